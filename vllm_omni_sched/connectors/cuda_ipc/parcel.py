"""Messages whose device tensors are in blocks: one block per device, with all its tensors in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import ALIGNMENT, ON_DEVICE, Message

if TYPE_CHECKING:
    import torch

Entry = tuple[int, int, int]
"""One tensor: index of its buffer in the message, offset in the block, size in bytes."""


@dataclass(frozen=True)
class Group:
    """Tensors of a message on one device, and their places in a block."""

    device: str
    entries: Sequence[Entry]
    nbytes: int


@dataclass(frozen=True)
class Block:
    """A group in flight: the shared memory, and its handle."""

    handle: bytes
    memory: torch.Tensor  # shape (nbytes,), uint8
    group: Group


@dataclass(frozen=True, eq=False)
class Parcel:
    """The blocks of a message in flight."""

    edge: Edge
    key: str
    name: bytes
    blocks: Sequence[Block]
    nbytes: int


def groups(message: Message, device_of: Callable[[torch.Tensor], str | None]) -> list[Group]:
    """Return the tensors of a message that are on devices, grouped by device."""
    found: dict[str, list[Entry]] = {}
    ends: dict[str, int] = {}
    for place, buffer in enumerate(message.buffers):
        device = None if isinstance(buffer, np.ndarray) else device_of(buffer)
        if device is None:
            continue
        at = -(-ends.get(device, 0) // ALIGNMENT) * ALIGNMENT
        nbytes = int(buffer.nbytes)
        found.setdefault(device, []).append((place, at, nbytes))
        ends[device] = at + nbytes
    return [Group(device, entries, ends[device]) for device, entries in found.items()]


def copy_to(memory: torch.Tensor, group: Group, message: Message) -> None:
    """Copy the tensors of a group into a block, on the device; they become contiguous."""
    for place, at, nbytes in group.entries:
        tensor = message.buffers[place].detach()
        memory[at : at + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)


def with_handles(message: Message, blocks: Sequence[Block]) -> Message:
    """Return the message to send: handles and places instead of the tensors."""
    buffers: list[Any] = list(message.buffers)
    for block in blocks:
        for place, _, _ in block.group.entries:
            buffers[place] = np.empty(0, np.uint8)
    described = [(block.handle, block.group.entries) for block in blocks]
    body = msgspec.msgpack.encode((described, message.body))
    sent = Message(message.edge, message.key, body, buffers)
    sent.flags, sent.id = message.flags | ON_DEVICE, message.id
    sent.next_use_seconds = message.next_use_seconds
    return sent
