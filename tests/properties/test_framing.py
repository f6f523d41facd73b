"""Messages of any payload come back, and no damage passes for a message or does harm."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgspec
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.config.errors import CorruptMessageError
from vllm_omni_sched.connectors.edge import Edge, name_of
from vllm_omni_sched.connectors.framing import Arrival, make_message
from vllm_omni_sched.connectors.framing.message import CHECKED, EMBEDDED, HEAD, HERE, PLACE, VALUE

EDGE = Edge("0", "1")
DTYPES = ["bool", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64"]
shapes = st.lists(st.integers(0, 4), max_size=3)
seeds = st.integers(0, 2**32 - 1)


def an_array(dtype: str, shape: list[int], seed: int, step: int, wide: int) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(seed).integers(0, 100, [*shape[:-1], shape[-1] * step * wide] if shape else [])
    return (np.asarray(values).astype(dtype))[..., ::step] if shape else np.asarray(values).astype(dtype)


# small ones are in the body, wide ones in buffers
arrays = st.builds(
    an_array, st.sampled_from(DTYPES), shapes, seeds, st.integers(1, 2), st.sampled_from([1, 1 + EMBEDDED])
)
tensors = arrays.map(lambda array: torch.from_numpy(np.array(array))) | st.builds(
    lambda shape, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16),
    shapes,
    seeds,
)
leaves = (
    *(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False)),
    *(st.text(), st.binary(), arrays, tensors),
)
payloads = st.recursive(
    st.one_of(*leaves),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
keys = st.text(max_size=20)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape) == (b.dtype, b.shape) and bool((a == b).all())
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and (a == b or (a != a and b != b))  # damage may make a number a NaN


@settings(deadline=None)
@given(payloads, keys, st.integers(0, 2**32 - 1))
def test_any_payload_comes_back(payload: Any, key: str, generation: int) -> None:
    message = make_message(EDGE, key, payload)
    room = np.zeros(message.nbytes + 100, np.uint8)
    message.write_to(memoryview(room)[50:-50], room.ctypes.data + 50, generation)
    assert not room[:50].any()
    assert not room[-50:].any()  # it stays within its room
    assert same(payload, Arrival(room[50:], name_of(EDGE, key), generation).open())


@settings(deadline=None)
@given(payloads, keys, st.data())
def test_a_cut_is_found(payload: Any, key: str, data: st.DataObject) -> None:
    written = make_message(EDGE, key, payload).to_buffer()
    _is_refused(written[: data.draw(st.integers(0, len(written) - 1))])


@settings(max_examples=300, deadline=None)
@given(payloads, keys, st.data())
def test_a_changed_byte_is_found_or_lies_in_a_buffer(payload: Any, key: str, data: st.DataObject) -> None:
    message = make_message(EDGE, key, payload)
    written = message.to_buffer()
    at = data.draw(st.integers(0, len(written) - 1))
    written[at] ^= data.draw(st.integers(1, 255))
    first = min((start for start, nbytes in message._places if nbytes), default=message.nbytes)
    try:
        found = Arrival(written, message.name).open()
    except CorruptMessageError:
        assert at < first, "a message was refused for what lies in a buffer"
        return
    inside = [start <= at < start + nbytes for start, nbytes in message._places]
    if not any(inside):  # in between
        assert same(payload, found)


@settings(max_examples=300, deadline=None)
@given(payloads, keys, st.booleans(), st.data())
def test_with_a_checksum_of_the_buffers_every_change_is_found(
    payload: Any, key: str, in_pieces: bool, data: st.DataObject
) -> None:
    """Of any bytes, up to a run of four; what lies between buffers is nobody's."""
    message = make_message(EDGE, key, payload)
    written = message.to_buffer(checked=True)
    if in_pieces:
        assert written == b"".join(bytes(piece) for piece in message.pieces(checked=True))
    assert same(payload, Arrival(bytearray(written), message.name).open())
    at, changed = data.draw(st.integers(0, len(written) - 1)), bytearray(written)
    for place in range(at, min(at + data.draw(st.integers(1, 4)), len(written))):
        changed[place] ^= data.draw(st.integers(1, 255))
    (flags,) = struct.unpack_from("<H", changed, 10)
    try:
        found = Arrival(changed, message.name).open()
    except CorruptMessageError:
        return
    assert flags & CHECKED
    assert same(payload, found)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(written: bytes) -> None:
    _is_refused(bytearray(written))


@settings(deadline=None)
@given(payloads, st.binary(min_size=1, max_size=8), st.data())
def test_a_forged_front_does_no_harm(payload: Any, forged: bytes, data: st.DataObject) -> None:
    """With a checksum that fits: whatever it says, only `CorruptMessageError`, or a payload from within the message."""
    message = make_message(EDGE, "key", payload)
    written = message.to_buffer()
    front = len(message.name) + len(message.body) + HEAD.size + PLACE.size * len(message._places)
    at = data.draw(st.integers(8, front - 1))
    written[at : min(at + len(forged), front)] = forged[: front - at]
    _sign(written)
    try:
        found = Arrival(written).open()
    except CorruptMessageError:
        return
    start, end = np.frombuffer(written, np.uint8).ctypes.data, len(written)
    for address, nbytes in _buffers(found):
        assert nbytes <= EMBEDDED or start <= address <= address + nbytes <= start + end


kinds = st.sampled_from(
    ["float32", "int8", "float8", "RGB", "L", "F", "nn", "<f4", "O", "V8", "i4,O", "(2,3)f4", "<U0", ",", "{}", "dtype"]
)
extensions = st.builds(
    lambda code, described: msgspec.msgpack.Ext(code, msgspec.msgpack.encode(described)),
    st.integers(0, 5),
    st.recursive(
        st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 2) | st.none() | st.floats() | kinds,
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=8,
    ),
)


def described(code: int, which: int, kind: str, shape: list[int], length: int, more: bytes) -> msgspec.msgpack.Ext:
    description = msgspec.msgpack.encode([kind, shape])
    front = VALUE.pack(which, max(0, len(description) + length))
    return msgspec.msgpack.Ext(code, front + description + more)


descriptions = st.builds(
    described,
    st.integers(1, 3),
    st.sampled_from([0, 1, 2, HERE]),
    kinds,
    st.lists(st.integers(-2, 5) | st.sampled_from([2**40, 2**63 - 1, 2**64 - 1, -(2**63)]), max_size=4),
    st.sampled_from([0, 0, 0, -1, 1, 999]),
    st.binary(max_size=100) | st.just(bytes(48)),
)


@settings(max_examples=300, deadline=None)
@given(extensions | descriptions)
def test_a_forged_extension_does_no_harm(extension: msgspec.msgpack.Ext) -> None:
    message = make_message(EDGE, "key", {"a": np.arange(EMBEDDED, dtype=np.float32), "e": extension})
    written = message.to_buffer()
    try:
        found = Arrival(written).open()
    except CorruptMessageError:
        return
    start = np.frombuffer(written, np.uint8).ctypes.data
    for address, nbytes in _buffers(found["e"]):
        assert nbytes <= EMBEDDED or start <= address <= address + nbytes <= start + len(written)


def _is_refused(written: bytearray) -> None:
    try:
        Arrival(written).open()
    except CorruptMessageError:
        return
    raise AssertionError("it was taken for a message")


def _sign(written: bytearray) -> None:
    """Put a checksum that fits into a front, where its lengths make any sense."""
    in_name, in_body, count = struct.unpack_from("<III", written, 12)
    end = HEAD.size + PLACE.size * count + in_name + in_body
    if end <= len(written):
        struct.pack_into("<I", written, 0, zlib.crc32(bytes(written[4:end])))


def _buffers(found: Any) -> list[tuple[int, int]]:
    if isinstance(found, torch.Tensor):
        return [(found.data_ptr(), found.numel() * found.itemsize)]
    if isinstance(found, np.ndarray):
        return [(found.ctypes.data, found.nbytes)]
    if isinstance(found, list):
        return [buffer for item in found for buffer in _buffers(item)]
    if isinstance(found, dict):
        return [buffer for item in found.values() for buffer in _buffers(item)]
    return []
