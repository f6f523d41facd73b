"""The compiled steps of small messages do what the Python code does, byte for byte, also with damaged messages."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.properties.test_framing import EDGE, keys, payloads, same
from tests.support.arena import place
from tests.support.compiled import why_not_compiled
from vllm_omni_sched.config.errors import CorruptMessageError
from vllm_omni_sched.connectors import native
from vllm_omni_sched.connectors.arena import layout
from vllm_omni_sched.connectors.arena.index import Index
from vllm_omni_sched.connectors.arena.layout import RECORD, Layout, State
from vllm_omni_sched.connectors.arena.meeting import create
from vllm_omni_sched.connectors.arena.memory import Memory
from vllm_omni_sched.connectors.framing import Arrival, make_message
from vllm_omni_sched.connectors.framing.arrival import DLPACK, front_of
from vllm_omni_sched.omni.payloads import _may_hold_outputs

kernel = native.kernel
pytestmark = pytest.mark.skipif(kernel is None, reason=why_not_compiled() or "")


def in_python() -> Any:
    return patch.object(native, "kernel", None)


def opened(written: bytearray, name: bytes) -> Any:
    """What is received, or None if it is refused."""
    try:
        return Arrival(bytearray(written), name).open()
    except CorruptMessageError:
        return None


@settings(deadline=None)
@given(payloads, keys, st.integers(0, 2**32 - 1), st.booleans())
def test_messages_are_the_same(payload: Any, key: str, generation: int, checked: bool) -> None:
    written = []
    for off in (False, True):
        with in_python() if off else patch.object(native, "kernel", kernel):
            message = make_message(EDGE, key, payload)
            room = np.zeros(message.nbytes, np.uint8)
            message.write_to(memoryview(room), room.ctypes.data, generation, checked)
            written.append((room.tobytes(), message.longest, _may_hold_outputs(message.body)))
    assert written[0] == written[1]
    compiled = opened(bytearray(written[0][0]), message.name)
    with in_python():
        assert same(opened(bytearray(written[0][0]), message.name), compiled)
    assert same(payload, compiled)


@settings(max_examples=300, deadline=None)
@given(payloads, keys, st.data())
def test_what_is_refused_is_the_same(payload: Any, key: str, data: st.DataObject) -> None:
    assert kernel is not None
    message = make_message(EDGE, key, payload)
    written = message.to_buffer()
    for at in data.draw(st.lists(st.integers(0, min(len(written), 80) - 1), max_size=2)):
        written[at] ^= data.draw(st.integers(1, 255))
    written = written[: data.draw(st.integers(0, len(written)))] if data.draw(st.booleans()) else written
    if len(written) > 8 and data.draw(st.booleans()):  # so that lengths and places are looked at, too
        head = layout_of_front(written)
        written[:4] = checksum(written[4 : max(4, min(head, len(written)))])
    name, made = data.draw(st.sampled_from([None, message.name, b"other"])), data.draw(st.sampled_from([None, 0, 7]))
    try:
        expected = front_of(memoryview(written), name, made)
    except CorruptMessageError:
        expected = None
    assert kernel.read_front(written, name, made) == expected
    compiled = opened(written, message.name)
    with in_python():
        assert same(opened(written, message.name), compiled)


def layout_of_front(written: bytearray) -> int:
    """Length of what the checksum is of, as the message has it now."""
    in_name, in_body, places = (int.from_bytes(written[at : at + 4], "little") for at in (12, 16, 20))
    return 52 + 16 * places + in_name + in_body


def checksum(data: bytearray) -> bytes:
    import zlib

    return zlib.crc32(data).to_bytes(4, "little")


@pytest.mark.parametrize("dtype", [*DLPACK, "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (40, 64), (0, 4), (1,) * 70], ids=str)
def test_tensors_of_all_kinds_are_the_same(dtype: str, shape: tuple[int, ...]) -> None:
    if dtype == "float8_e4m3fn":
        values = torch.ones(shape).to(torch.float8_e4m3fn)
    else:
        values = torch.ones(shape, dtype=getattr(torch, dtype))
    for _ in range(2):  # the first of a kind takes the Python path, and the compiled steps learn of it
        found = Arrival(make_message(EDGE, "k", {"x": values}).to_buffer()).open()["x"]
        assert (found.dtype, found.shape, found.stride()) == (values.dtype, values.shape, values.stride())
        assert found.reshape(-1).view(torch.uint8).tolist() == values.reshape(-1).view(torch.uint8).tolist()
        found.reshape(-1).view(torch.uint8).zero_()  # it can be written to


def test_a_tensor_keeps_the_message_that_it_is_a_view_of() -> None:
    values = torch.arange(5000)
    for _ in range(2):
        written = make_message(EDGE, "k", {"x": values, "y": values + 1}).to_buffer()
        found = Arrival(written).open()
        del written
        y = found.pop("y")
        del found
        assert torch.equal(y, values + 1)


@pytest.mark.parametrize("odd", ["strided", "conj", "neg", "parameter", "read-only"])
def test_unusual_tensors_take_the_python_path(odd: str) -> None:
    values = {
        "strided": torch.arange(20)[::2],
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "read-only": torch.arange(5000),
    }[odd]
    for _ in range(2):
        written: Any = make_message(EDGE, "k", [values]).to_buffer()
        if odd == "read-only":
            written = np.frombuffer(bytes(written), np.uint8)
            with pytest.warns(UserWarning, match="not writable") if not _warned else _quiet():
                found = Arrival(written).open()[0]
            _warned.append(True)
        else:
            found = Arrival(written).open()[0]
        assert torch.equal(found, values)


_warned: list[bool] = []  # torch warns once in a process


@contextmanager
def _quiet() -> Iterator[None]:
    yield


def test_places_outside_their_buffer_make_no_tensor() -> None:
    assert kernel is not None
    values = torch.arange(5000)
    arrival = Arrival(make_message(EDGE, "k", values).to_buffer())
    arrival.open()  # learns the kind
    (source, at, nbytes) = arrival._places[0]
    extension = bytes(arrival._body)[-100:]
    assert extension  # the tensor's description is at the end of the body
    (_, data), *_ = extensions(arrival._body)
    from vllm_omni_sched.connectors.framing.arrival import _kinds

    assert kernel.tensor(data, [(source, at, nbytes)], _kinds) is not None
    for wrong in ((at + 1, nbytes), (2**63, nbytes), (2**64 - nbytes, nbytes), (at, nbytes - 8), (at, 2**63)):
        assert kernel.tensor(data, [(source, *wrong)], _kinds) is None
    assert kernel.tensor(data, [], _kinds) is None
    for end in range(len(data)):
        assert kernel.tensor(data[:end], [(source, at, nbytes)], _kinds) is None


def extensions(body: Any) -> list[tuple[int, bytes]]:
    import msgspec

    found: list[tuple[int, bytes]] = []
    msgspec.msgpack.Decoder(ext_hook=lambda code, data: found.append((code, bytes(data)))).decode(body)
    return found


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    assert kernel is not None
    for room in range(52 + 16 + 3):
        target = bytearray(room)
        with pytest.raises(ValueError, match="does not fit"):
            kernel.write_front(target, b"n", b"bb", [(100, 5)], 0, 0, 200, 0, 0)
        assert not any(target)
    with pytest.raises(TypeError):
        kernel.write_front(bytearray(100), b"n", b"bb", [3], 0, 0, 200, 0, 0)
    assert kernel.embedded(torch.ones(3), b"front", 13) is None
    sizes = Layout.of(32, 4096)
    for wrong in ({"slots": 31}, {"slots": 1 << 21}, {"records": 8}, {"ring": sizes.nbytes + 1}, {"ring": 4096}):
        with pytest.raises(ValueError, match="not the layout"):
            kernel.Slots(
                bytearray(sizes.nbytes),
                0,
                **({"slots": sizes.slots, "records": sizes.records, "ring": sizes.ring} | wrong),
            )
    slots = kernel.Slots(bytearray(sizes.nbytes), 0, sizes.slots, sizes.records, sizes.ring)
    for act in (slots.publish, slots.take):
        with pytest.raises((IndexError, TypeError)):
            act(32, 1, b"name") if act == slots.take else act(32, 1, 1, 0, 0, 64, 0.0)


numbers = itertools.count()


@contextmanager
def an_index(root: str, compiled: bool) -> Iterator[tuple[Index, Memory]]:
    """An empty outbox of 32 slots and a page."""
    sizes = Layout.of(32, 4096)
    path = Path(root) / secrets.token_hex(4)
    memory = Memory(create(path, sizes.nbytes), sizes.nbytes, sizes.nbytes)
    with patch.object(native, "kernel", kernel if compiled else None):
        index = Index(memory, sizes)
    try:
        yield index, memory
    finally:
        path.unlink()
        del index
        memory.close()


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[int, bytes]]:
    """What is written into a record by another process: offsets and bytes."""
    field = st.sampled_from([(0, 4), (4, 4), (8, 4), (12, 4), (16, 8), (24, 8), (32, 8)])
    values = st.integers(0, 5) | st.sampled_from([64, 4096, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 64, 2**64 - 1])
    found = []
    for at, nbytes in draw(st.lists(field, max_size=2)):
        found.append((at, (draw(values) % 2 ** (8 * nbytes)).to_bytes(nbytes, "little")))
    return found


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 31), st.integers(1, 2**64 - 1), damages(), st.booleans(), st.integers(0, 255))
@example(3, 2**64 - 1, [(16, (2**64 - 64).to_bytes(8, "little"))], False, 0)
def test_an_index_is_the_same(
    slot: int, digest: int, damage: list[tuple[int, bytes]], other_name: bool, altered: int
) -> None:
    """Whoever publishes and whoever takes: the memory, what is found, and what is refused."""
    outcomes = []
    for publishing, taking in itertools.product((False, True), repeat=2):
        with place() as root, an_index(root, publishing) as (sender, memory), an_index(root, taking) as (_, __):
            with patch.object(native, "kernel", kernel if taking else None):
                receiver = Index(memory, sender.layout)
            message = make_message(EDGE, "k", {"x": torch.arange(7)})
            room = memory.view[sender.layout.ring + 128 : sender.layout.ring + 128 + message.nbytes]
            message.write_to(room, memory.address + sender.layout.ring + 128, 5)
            room[-1] ^= altered
            room.release()
            sender.publish(slot, digest, 5, layout.RING, 128, message.nbytes, 12.5)
            at = sender.layout.record_at(slot)
            before = bytes(memory.view[: sender.layout.nbytes])
            for offset, value in damage:
                memory.view[at + offset : at + offset + len(value)] = value
            found = receiver.find(digest)
            try:
                arrival = receiver.take(slot, digest, b"other" if other_name else message.name)
                got = None if arrival is None else (arrival.open()["x"].tolist(), arrival.put_at, arrival.generation)
            except CorruptMessageError as error:
                got = str(error)
            after = bytes(memory.view[: sender.layout.nbytes])
            outcomes.append((before, found, got, after, receiver.settled(slot)))
            del sender, receiver
    assert all(outcome == outcomes[0] for outcome in outcomes)
    if not damage and not other_name and not altered:
        assert outcomes[0][2] == (list(range(7)), 12.5, 5)
        assert RECORD.unpack_from(outcomes[0][3], at)[0] == State.CONSUMED
