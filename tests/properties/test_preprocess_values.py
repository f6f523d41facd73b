"""Values come out of shared memory as they went in, and whatever else lies there is refused."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from vllm_omni_sched.config.errors import UnsupportedValueError
from vllm_omni_sched.preprocess import values
from vllm_omni_sched.preprocess.values import Picture, Pixels

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
DTYPES = (*(torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64),)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 1 << 30))
    made = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.transpose(0, -1) if made.ndim > 1 and draw(st.booleans()) else made


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=200)
    | tensors()
    | arrays.arrays(arrays.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufc"), SHAPES)
    | st.builds(np.float32, st.floats(width=32, allow_nan=False))
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def sent(value: Any) -> Any:
    """Return a value after its way through a memory file."""
    encoded = values.encode(value)
    fd = values.sealed_file(encoded)
    try:
        memory = values.map_sealed(fd, 1 << 30)
    finally:
        os.close(fd)
    return values.decode(msgspec.msgpack.decode(msgspec.msgpack.encode(encoded.tree)), memory)


def equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@given(VALUES)
def test_values_come_out_as_they_went_in(value: Any) -> None:
    assert equal(sent(value), value)


def test_pictures_come_out_as_they_went_in() -> None:
    picture = Picture(b"encoded", "RGB", {"rgba_background_color": (1, 2, 3)}, (640, 480), True)
    found = sent([picture, Pixels("L", np.arange(6, dtype=np.uint8).reshape(2, 3))])
    assert bytes(found[0].data) == b"encoded"
    assert (found[0].mode, found[0].settings, found[0].size, found[0].converted) == (
        ("RGB", {"rgba_background_color": (1, 2, 3)}, (640, 480), True)
    )
    assert found[1].mode == "L"
    assert found[1].array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_tensor_is_a_private_copy_that_may_be_changed() -> None:
    encoded = values.encode(torch.zeros(3))
    fd = values.sealed_file(encoded)
    one, other = (values.decode(encoded.tree, values.map_sealed(fd, 100)) for _ in range(2))
    os.close(fd)
    one += 1
    assert one.tolist() == [1, 1, 1]
    assert other.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "value",
    [object(), {1: "x"}, {"a": {2}}, np.array([object()]), torch.zeros(2).to_sparse(), np.array(["text"])],
    ids=["object", "key", "set", "objects", "sparse", "text"],
)
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(UnsupportedValueError):
        values.encode(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnsupportedValueError, match="contains itself"):
        values.encode(value)


TREES = st.recursive(
    st.none()
    | st.integers(-(2**40), 2**40)
    | st.text(max_size=6)
    | st.sampled_from("Tanltdbipx")
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=20,
)


@given(TREES)
def test_malformed_trees_are_refused_and_never_read_outside(tree: Any) -> None:
    with contextlib.suppress(ValueError):
        values.decode(tree, memoryview(bytearray(64)))


@pytest.mark.parametrize(
    "tree",
    [
        ["T", "float32", [4], 56, 16],
        ["T", "float32", [5], 0, 16],
        ["T", "float32", [-1], 0, 4],
        ["T", "object", [1], 0, 4],
        ["a", "|O", [1], 0, 8],
        ["a", "<f4", [1 << 62, 1 << 62], 0, 0],
        ["b", -8, 8],
        ["b", 0, 65],
        ["b", 0, 1 << 70],
        ["d", [["a"]]],
        ["q", 1],
    ],
    ids=str,
)
def test_wrong_bounds_and_types_are_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match=r"another process"):
        values.decode(tree, memoryview(bytearray(64)))


def test_only_sealed_files_of_the_allowed_size_are_read() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, b"12345678")
    with pytest.raises(ValueError, match="not sealed"):
        values.map_sealed(fd, 8)
    os.close(fd)
    fd = values.sealed_file(values.encode(b"12345678"))
    with pytest.raises(ValueError, match="8 bytes, but only 7"):
        values.map_sealed(fd, 7)
    with pytest.raises(PermissionError):
        os.write(fd, b"x")
    os.close(fd)
