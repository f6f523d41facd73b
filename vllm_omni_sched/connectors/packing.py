"""Compression of the buffers of messages."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from vllm_omni_sched.connectors.compression.codec import ITEM_BYTES
from vllm_omni_sched.connectors.compression.compressor import RAW, Buffer, Compressor
from vllm_omni_sched.connectors.framing import PACKED, Message


def pack(message: Message, compressor: Compressor, link_bytes_per_second: float | None) -> Message:
    """Return the message, or a compressed copy that is sent in less time; the original is not changed."""
    edge = str(message.edge)
    if message.flags & PACKED or compressor.sends_raw(edge, message.payload_bytes, link_bytes_per_second):
        return message
    buffers = [buffer_of(one) for one in message.buffers]
    packed = compressor.compress(edge, buffers, link_bytes_per_second)
    entries = [
        (place, (one.codec, buffer.dtype, buffer.shape, buffer.raw.size))
        for place, (one, buffer) in enumerate(zip(packed, buffers, strict=True))
        if one.codec != RAW
    ]
    if not entries:
        return message
    data: list[Any] = list(message.buffers)
    for place, _ in entries:
        data[place] = packed[place].data
    body = msgspec.msgpack.encode((entries, message.body))
    smaller = Message(message.edge, message.key, body, data, message.longest)
    smaller.flags = message.flags | PACKED
    return smaller


def buffer_of(value: Any) -> Buffer:
    """Return an array or tensor as flat bytes on the host; copied only if needed."""
    if isinstance(value, np.ndarray):
        flat = np.ascontiguousarray(value).reshape(-1)
        raw, dtype, shape = flat.view(np.uint8), value.dtype.name, value.shape
    else:
        import torch

        tensor = value.detach().cpu().contiguous()
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if dtype not in ITEM_BYTES:
        dtype, shape = "uint8", raw.shape
    return Buffer(raw, dtype, shape)
