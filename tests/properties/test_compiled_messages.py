"""The compiled steps of small messages do what the Python code does, byte for byte, also with damaged messages."""

from __future__ import annotations

import importlib.util
import itertools
import secrets
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.properties.test_framing import EDGE, keys, payloads, same
from tests.support.arena import FakeClock, place, small
from tests.support.compiled import why_not_compiled
from vllm_omni_sched.config.errors import CorruptMessageError, MessageTooLargeError
from vllm_omni_sched.connectors import native
from vllm_omni_sched.connectors.arena import ArenaTransport, layout
from vllm_omni_sched.connectors.arena.index import Index
from vllm_omni_sched.connectors.arena.layout import RECORD, Layout, State
from vllm_omni_sched.connectors.arena.meeting import create
from vllm_omni_sched.connectors.arena.memory import Memory
from vllm_omni_sched.connectors.framing import Arrival, make_message
from vllm_omni_sched.connectors.framing.arrival import Opener, front_of
from vllm_omni_sched.connectors.framing.layout import EMBEDDED
from vllm_omni_sched.connectors.framing.message import Packer
from vllm_omni_sched.omni.payloads import _may_hold_outputs

kernel = native.kernel
DTYPES = [
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"),
    *("bfloat16", "complex64", "complex128", "bool", "float8_e4m3fn"),
]
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (40, 64), (0, 4), (1,) * 70], ids=str)
def test_tensors_of_all_kinds_are_the_same(dtype: str, shape: tuple[int, ...]) -> None:
    assert kernel is not None
    values = torch.ones(shape).to(getattr(torch, dtype))
    with in_python():
        expected = make_message(EDGE, "k", {"x": values})
    compiled = kernel.pack({"x": values}, EMBEDDED)
    assert (compiled is None) == (dtype == "float8_e4m3fn" or len(shape) > 64)  # DLPack knows no other name for it
    if compiled is not None:
        assert compiled == (expected.body, expected.buffers, expected.longest)
    for path in (in_python(), patch.object(native, "kernel", kernel)):
        with path:
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


@pytest.mark.parametrize(
    "odd", ["strided", "conj", "neg", "one negated", "dense and negated", "parameter", "read-only"]
)
def test_unusual_tensors_take_the_python_path(odd: str) -> None:
    values = {
        "strided": torch.arange(20)[::2],
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "one negated": torch.tensor([1 + 2j]).conj().imag,
        "dense and negated": torch._neg_view(torch.ones(3)),
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
    arrival.open()
    body, (source, at, nbytes) = bytes(arrival._body), arrival._places[0]
    assert torch.equal(kernel.unpack(body, [(source, at, nbytes)]), values)
    for wrong in ((at + 1, nbytes), (2**63, nbytes), (2**64 - nbytes, nbytes), (at, nbytes - 8), (at, 2**63)):
        assert kernel.unpack(body, [(source, *wrong)]) is NotImplemented
    assert kernel.unpack(body, []) is NotImplemented
    for end in range(len(body)):
        assert kernel.unpack(body[:end], [(source, at, nbytes)]) is NotImplemented
    assert kernel.unpack(body + b"\xc0", [(source, at, nbytes)]) is NotImplemented


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=40) | payloads.map(lambda payload: make_message(EDGE, "k", payload).body), st.data())
def test_bodies_that_are_damaged_are_read_as_by_python_or_not_at_all(body: bytes, data: st.DataObject) -> None:
    assert kernel is not None
    damaged = bytearray(body)
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=3)) if body else ():
        damaged[at] = data.draw(st.integers(0, 255))
    found = kernel.unpack(bytes(damaged), [])
    if found is not NotImplemented:
        assert same(Opener().open(bytes(damaged), []), found)


@given(st.binary(max_size=300))
def test_digests_are_the_same(name: bytes) -> None:
    assert kernel is not None
    with in_python():
        assert kernel.digest(name) == layout.digest_of(name)


def deep(levels: int) -> Any:
    payload: Any = 1
    for _ in range(levels):
        payload = [payload]
    return payload


@pytest.mark.parametrize(
    "payload",
    [2**64, -(2**63) - 1, "\ud800", {1.5: 2}, {1}, b"alone", deep(100), np.arange(3), True + 0j, {"a": Path("b")}],
    ids=repr,
)
def test_what_is_no_plain_data_takes_the_python_path(payload: Any) -> None:
    assert kernel is not None
    assert kernel.pack(payload, EMBEDDED) is None


@pytest.mark.parametrize(
    "payload",
    [
        *(sign * (2**bits + more) for bits in (0, 5, 7, 8, 15, 16, 31, 32, 63) for more in (-1, 0) for sign in (1, -1)),
        *("x" * length for length in (0, 31, 32, 255, 256, 65535, 65536)),
        *([b"x" * length] for length in (0, 255, 256, 65535, 65536)),
        *([0] * length for length in (15, 16, 65535, 65536)),
        *(dict.fromkeys(range(length)) for length in (15, 16, 65535, 65536)),
        *(torch.zeros(size, dtype=torch.uint8) for size in (0, 2, 200, 240, 2048, 2049)),
        *(0.0, -0.0, float("inf"), 2**64 - 1, "é\0", (1, 2), {"a": (True, None)}),
    ],
    ids=lambda payload: repr(payload)[:20],
)
def test_sizes_at_their_bounds_are_written_and_read_alike(payload: Any) -> None:
    assert kernel is not None
    body, buffers, longest = kernel.pack(payload, EMBEDDED)
    assert (body, buffers, longest) == Packer().pack(payload, None)
    places = [(bytearray(buffer.numpy().tobytes()), 0, buffer.nbytes) for buffer in buffers]
    assert same(kernel.unpack(body, places), Opener().open(body, places))


def test_without_dlpack_functions_python_reads_and_makes_tensors(tmp_path: Path) -> None:
    """As with an old torch: a copy of the module that was never shown one that has them."""
    assert kernel is not None
    spec = importlib.util.spec_from_file_location(kernel.__name__, shutil.copy(kernel.__file__, tmp_path))
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    message = make_message(EDGE, "k", {"x": torch.arange(5000), "y": torch.arange(3)})
    for library in (object(), SimpleNamespace(Tensor=int), SimpleNamespace(Tensor=torch.Size)):
        assert fresh.use_torch(library) is False
        assert fresh.pack({"y": torch.arange(3)}, EMBEDDED) is None
        assert fresh.unpack(message.body, [(bytearray(40000), 0, 40000)]) is NotImplemented
        assert fresh.write(bytearray(message.nbytes), message, 0, False) is False
    assert fresh.unpack(fresh.pack({"y": 3}, EMBEDDED)[0], []) == {"y": 3}
    assert fresh.use_torch(torch) is True
    assert fresh.pack({"x": message.buffers[0], "y": torch.arange(3)}, EMBEDDED)[0] == message.body


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    assert kernel is not None
    message = make_message(EDGE, "k", {"x": torch.arange(500)})
    for wrong_pack in ((1,), (1, "2"), (1, 2**64), ()):
        with pytest.raises((TypeError, OverflowError)):
            kernel.pack(*wrong_pack)
    assert kernel.pack(torch.arange(0), -1)[1]  # all in buffers
    for room in range(message.nbytes):
        target = bytearray(room)
        with pytest.raises(ValueError, match="does not fit"):
            kernel.write(target, message, 0, False)
        assert not any(target)
    message._places = [(3, 4000)]
    with pytest.raises(ValueError, match="does not fit"):
        kernel.write(bytearray(5000), message, 0, False)
    for places in ([3], [("a", 4000)], [], [(1, 2, 3)], None):
        message._places = places  # type: ignore[assignment]
        with pytest.raises(TypeError):
            kernel.write(bytearray(5000), message, 0, False)
    with pytest.raises(AttributeError):
        kernel.write(bytearray(5000), object(), 0, False)
    sizes = Layout.of(32, 4096)
    for wrong in ({"slots": 31}, {"slots": 1 << 21}, {"records": 8}, {"ring": sizes.nbytes + 1}, {"ring": 4096}):
        with pytest.raises(ValueError, match="not the layout"):
            kernel.Slots(
                bytearray(sizes.nbytes),
                0,
                **({"slots": sizes.slots, "records": sizes.records, "ring": sizes.ring} | wrong),
            )
    slots = kernel.Slots(bytearray(sizes.nbytes), 0, sizes.slots, sizes.records, sizes.ring)
    with pytest.raises(IndexError):
        slots.publish(32, 1, 1, 0, 0, 64, 0.0)
    for arguments in ((), (1, "name", None), ("1", b"name", None)):
        with pytest.raises(TypeError):
            slots.receive(*arguments)
    small = make_message(EDGE, "k", 1)
    for offset, nbytes, free in (
        (4096, 64, [[1], [17]]),
        (2**64 - 64, 64, [[1], [17]]),
        (0, 40, [[1], [17]]),
        (0, 100, [[1]]),
        (0, 100, [[32], [32]]),
        (0, 100, [[None], [None]]),
        (0, 100, [(), ()]),
    ):
        with pytest.raises((ValueError, IndexError, TypeError)):
            slots.send(small, free, offset, nbytes, 1, False, lambda: 1.5)
    assert slots.send(small, [[], []], 0, 100, 1, False, lambda: 1.5) is None
    with pytest.raises(TypeError):
        slots.send(small, [[1], [17]], 0, 100, 1, False, lambda: "now")
    free = [[1], [17]]
    with pytest.raises(RuntimeError):
        slots.send(small, free, 0, 100, 1, False, lambda: free[0].clear() or free[1].clear() or 1.5)
    closed = kernel.Slots(bytearray(sizes.nbytes), -1, sizes.slots, sizes.records, sizes.ring)
    mutex, key = threading.Lock(), small.name
    assert closed.receive(layout.digest_of(key), key, mutex) is None
    free = [[1], [17]]
    assert closed.send(small, free, 0, small.nbytes, 1, False, lambda: 1.5)[1] == 1.5
    assert sorted(map(len, free)) == [0, 1]
    with pytest.raises(OSError, match="Bad file descriptor"):
        closed.receive(layout.digest_of(key), key, mutex)
    assert mutex.acquire(blocking=False)
    assert closed.receive(layout.digest_of(key), key, mutex) is False  # another thread has a slot locked
    words = bytearray(8)
    kernel.wake(words, 1)
    assert words == bytes((0, 0, 0, 0, 1, 0, 0, 0))
    for word in (-1, 2):
        with pytest.raises(IndexError):
            kernel.wake(words, word)


def received(receiver: Index, digest: int, name: bytes) -> Arrival | None:
    """Take a message out of the ring, as an inbox does."""
    found = receiver.receive(digest, name)
    if not isinstance(found, bool):
        return found
    for slot in receiver.find(digest) if found else ():
        if receiver.is_inline(slot) and (taken := receiver.take(slot, digest, name)) is not None:
            return taken
    return None


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
    outcomes, digest = [], (digest & ~1 | slot // 16) or 2
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
                arrival = received(receiver, digest, b"other" if other_name else message.name)
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


def put_into(transport: ArenaTransport, key: str, payload: Any) -> Any:
    """Return what the transport says of a message, or why it takes none of this size."""
    try:
        return transport.put(make_message(EDGE, key, payload))
    except MessageTooLargeError as error:
        return str(error)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(payloads, st.sampled_from("abc")), max_size=6), st.booleans())
def test_an_outbox_is_the_same(messages: list[tuple[Any, str]], checksum: bool) -> None:
    """Whatever is put, and put again: the memory, the slots and the room."""
    outcomes = []
    for compiled in (False, True):
        with place() as root, patch.object(native, "kernel", kernel if compiled else None):
            transport = ArenaTransport(small(root, checksum=checksum), FakeClock())
            held = [put_into(transport, key, payload) for payload, key in messages]
            outbox = transport._sender()
            memory = bytes(outbox.storage.memory.view[layout.NEWS_AT :])
            sent = [(one.slot, one.name, one.pool, one.offset, one.nbytes, one.put_at) for one in outbox.sent.values()]
            outcomes.append((memory, held, sent, outbox._free, outbox.facts()))
            transport.close()
    assert outcomes[0] == outcomes[1]
