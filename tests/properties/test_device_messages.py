"""Messages with blocks: any tensors come back, by handles and from the host, and no damage passes for a message."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.config.errors import CorruptMessageError
from vllm_omni_sched.connectors.cuda_ipc.sending import Block, copy_to, groups, with_handles
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import ON_DEVICE, Arrival, Message, make_message, message, message_of

EDGE = Edge("0", "1")
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]


def a_tensor(dtype: torch.dtype, shape: list[int], seed: int, turned: bool, step: int) -> torch.Tensor:
    wide = [*shape[:-1], shape[-1] * step] if shape else []
    message = torch.randint(0, 100, wide, generator=torch.Generator().manual_seed(seed)).to(dtype)
    message = message[..., ::step] if shape else message
    return message.transpose(0, -1) if turned and shape else message


tensors = st.builds(
    a_tensor,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 99),
    st.booleans(),
    st.integers(1, 2),
)
on_devices = st.lists(st.tuples(tensors, st.sampled_from(["none", "a", "b"])), max_size=6)


def packed(message: Message, devices: list[str]) -> tuple[dict[bytes, torch.Tensor], Message]:
    """Blocks by handle and the message, as `BlockSender` makes them, where each buffer is said to be on a device."""
    where = {id(buffer): device for buffer, device in zip(message.buffers, devices, strict=True)}
    blocks = []
    for group in groups(message, lambda buffer: None if where[id(buffer)] == "none" else where[id(buffer)]):
        memory = torch.full((group.nbytes,), 255, dtype=torch.uint8)
        copy_to(memory, group, message)
        blocks.append(Block(group.device.encode(), memory, group))
    memory = {block.handle: block.memory for block in blocks}
    return memory, with_handles(message, blocks) if blocks else message


@pytest.fixture(autouse=True, scope="module")
def all_in_buffers() -> Iterator[None]:
    """As tensors of a device are, however small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message, "EMBEDDED", -1)
        yield


@settings(deadline=None, max_examples=60)
@given(on_devices)
def test_any_tensors_come_back_by_handles_and_from_the_host(payload: list[tuple[torch.Tensor, str]]) -> None:
    sent = [tensor for tensor, _ in payload]
    memory, message = packed(make_message(EDGE, "k", {"x": sent, "n": 1}), [device for _, device in payload])
    arrivals = [Arrival(message.to_buffer()) for _ in range(2)]
    arrivals[0].fetch(lambda handle, keep: memory[handle])
    arrivals[1].fetch(lambda handle, keep: memory[handle].numpy())
    found = [arrivals[0].open(), Arrival(message_of(arrivals[1], EDGE, "k").to_buffer(), message.name).open()]
    for one in found:
        assert one["n"] == 1
        for ours, theirs in zip(one["x"], sent, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(ours, theirs)


numbers = st.integers(-200, 200) | st.none() | st.text(max_size=2)
entries = st.lists(st.tuples(numbers, numbers, numbers) | numbers, max_size=3)
forged = st.tuples(
    st.lists(st.tuples(st.binary(max_size=3) | numbers, entries) | numbers, max_size=3) | numbers,
    st.binary(max_size=8)
    | st.just(msgspec.msgpack.encode({"x": msgspec.msgpack.Ext(1, b"\x93\x00\xa5uint8\x91\x05")})),
)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=30) | forged.map(msgspec.msgpack.encode))
def test_no_forged_handles_pass_for_a_message_or_do_harm(body: bytes) -> None:
    message = Message(EDGE, "k", body, [np.zeros(5, np.uint8), np.zeros(0, np.uint8)])
    message.flags = ON_DEVICE
    arrival = Arrival(message.to_buffer())
    try:
        arrival.fetch(lambda handle, keep: torch.zeros(len(handle) + 50, dtype=torch.uint8))
        arrival.open()
    except CorruptMessageError:
        return
    assert not arrival.flags & ON_DEVICE
