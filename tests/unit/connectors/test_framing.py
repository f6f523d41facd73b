"""What comes out of a message is what went in, and what cannot go in says so."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import warnings
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image, TiffImagePlugin

from vllm_omni_sched.config.errors import CorruptMessageError, PayloadError
from vllm_omni_sched.connectors.edge import Edge, name_of
from vllm_omni_sched.connectors.framing import ALIGNMENT, REVIVE, Arrival, make_message

EDGE = Edge("0", "1")
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
SHAPES = [(), (1,), (7,), (3, 5), (2, 1, 4), (0,), (0, 3), (3, 0)]


def sent(payload: Any, revives: bool = False, **options: Any) -> bytearray:
    message = make_message(EDGE, "key", payload, **options)
    message.flags |= REVIVE * revives
    return message.to_buffer()


def there_and_back(payload: Any) -> Any:
    return Arrival(sent(payload), name_of(EDGE, "key")).open()


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that some dtypes are experimental
        tensor = torch.empty(shape, dtype=dtype)
    size = tensor.numel() * tensor.itemsize
    bits = np.random.default_rng(1).integers(0, 2 if dtype is torch.bool else 256, size, np.uint8)
    if size:
        ctypes.memmove(tensor.data_ptr(), bits.ctypes.data, size)
    return tensor


def bits_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.itemsize) if tensor.numel() else b""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in QUANTIZED], ids=str)
def test_tensors_of_all_dtypes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape)
    found = there_and_back({"x": tensor})["x"]
    assert (found.dtype, found.shape) == (dtype, shape)
    assert bits_of(found) == bits_of(tensor)


def test_all_dtypes_are_tried() -> None:
    assert {torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn, torch.uint64} <= set(DTYPES) - QUANTIZED


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24).view(4, 6).t(),
        torch.arange(24).view(4, 6)[:, ::2],
        torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(3).expand(4, 3),
        torch.arange(24, dtype=torch.bfloat16)[1::5],
        torch.randn(3, 3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.nn.Parameter(torch.ones(3)),
        (torch.ones(3, requires_grad=True) * 2),
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ],
    ids=range(10),
)
def test_tensors_that_do_not_lie_in_one_piece(tensor: torch.Tensor) -> None:
    found = there_and_back(tensor)
    assert torch.equal(found, tensor.detach().resolve_conj().resolve_neg())
    assert found.dtype == tensor.dtype
    assert not found.requires_grad


ARRAYS = {
    **{
        kind: np.arange(6).reshape(2, 3).astype(kind) for kind in ("?", "u1", "i2", "f2", "f8", "c8", ">i4", "U7", "S5")
    },
    "0-dim": np.array(3.5),
    "empty": np.zeros((0, 4), np.int16),
    "Fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(20)[::-3],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "durations": np.array([1, 2], "m8[ms]"),
    "read-only": np.frombuffer(b"abcd", np.uint8),
    "subclass": np.arange(4).view(np.recarray),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays(array: np.ndarray[Any, Any]) -> None:
    found = there_and_back([array])[0]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.int64(7), np.bool_(True), np.complex64(1j)], ids=repr)
def test_scalars_of_numpy_arrive_as_arrays_without_dimensions(scalar: Any) -> None:
    found = there_and_back({"x": scalar})["x"]
    assert (found.dtype, found.shape, found[()]) == (scalar.dtype, (), scalar)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "I;16", "RGBX"])
@pytest.mark.parametrize("size", [(5, 3), (1, 1), (0, 0)], ids=str)
def test_images(mode: str, size: tuple[int, int]) -> None:
    image = Image.new(mode, size)
    for x in range(size[0]):
        image.paste(Image.new(mode, (1, 1), tuple([7 * x] * len(image.getbands())) if mode != "F" else 0.5 * x), (x, 0))
    found = there_and_back({"image": image})["image"]
    assert (found.mode, found.size) == (mode, size)
    assert found.tobytes() == image.tobytes()


@pytest.mark.parametrize(("mode", "becomes"), [("1", "L"), ("P", "RGBA")])
def test_images_whose_pixels_are_no_bytes_become_others(mode: str, becomes: str) -> None:
    image = Image.linear_gradient("L").convert(mode)
    found = there_and_back(image)
    assert found.mode == becomes
    assert found.tobytes() == image.convert(becomes).tobytes()


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Data:
    tensor: torch.Tensor
    name: str
    more: dict[str, Any]


class Struct(msgspec.Struct):
    array: Any
    number: int = 3


def test_plain_data_of_all_kinds() -> None:
    payload = {
        "none": None, "true": True, "int": -(2**63), "large": 2**64 - 1, "float": 1e-300, "infinite": float("-inf"),
        "text": "ключ \0 🔑", "bytes": b"\0\xff", "list": [1, [2, [3, []]]], 4: {5.5: "keys"}, None: {b"k": (1, 2)},
    }  # fmt: skip
    found = there_and_back(payload)
    assert found == {**payload, None: {b"k": [1, 2]}}
    assert np.isnan(there_and_back([float("nan")])[0])


def test_objects_become_what_vllm_omni_makes_of_them() -> None:
    tensor = torch.arange(3)
    found = there_and_back({"d": Data(tensor, "n", {"x": [tensor]}), "s": Struct(np.arange(2)), "e": Color.RED})
    assert found["d"]["tensor"].tolist() == found["d"]["more"]["x"][0].tolist() == [0, 1, 2]
    assert (found["d"]["name"], found["s"]["number"], found["e"]) == ("n", 3, "red")
    assert found["s"]["array"].tolist() == [0, 1]
    assert there_and_back(({1}, (2,))) == [[1], [2]]


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"abc", bytearray(b"abc"), memoryview(b"abc"), memoryview(b"abcdef")[::2]),
        *(memoryview(np.arange(6).reshape(2, 3)), memoryview(np.asfortranarray(np.arange(6).reshape(2, 3)))),
    ],
    ids=range(7),
)
def test_bytes_alone_go_through_a_buffer(payload: Any) -> None:
    message = make_message(EDGE, "key", payload)
    assert message.payload_bytes == len(bytes(payload))
    assert Arrival(message.to_buffer()).open() == bytes(payload)


BAD = {
    "object": (object(), r"a object cannot be sent: tensors, arrays, images and plain data \(dict"),
    "nested": ({"a": [1, {"b": lambda: 1}]}, "a function cannot be sent"),
    "class": (Struct, "a StructMeta cannot be sent"),
    "large int": (2**64, "the payload cannot be sent: can't serialize ints"),
    "sparse": (torch.zeros(3).to_sparse(), r"a tensor that is torch.sparse_coo cannot be sent; make it dense"),
    "meta": (torch.empty(3, device="meta"), "a tensor on the meta device cannot be sent: it has no data"),
    "structured": (np.zeros(2, [("a", "i4"), ("b", "f8")]), r"an array of dtype \[\('a', '<i4'\), .* cannot be sent"),
    "objects": (np.array([object()]), "an array of dtype object cannot be sent"),
    "void": (np.zeros(2, "V8"), r"an array of dtype \|V8 cannot be sent"),
    "masked": (np.ma.masked_array([1, 2], [0, 1]), "a masked array cannot be sent; fill it"),
    "half of PIL": (TiffImagePlugin.IFDRational(1, 2), "a IFDRational cannot be sent"),
    "strided bytes": ([memoryview(b"abcd")[::2]], "the payload cannot be sent: .*contiguous"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_sent_is_named(name: str) -> None:
    payload, what = BAD[name]
    with pytest.raises(PayloadError, match=what):
        make_message(EDGE, "key", payload)


def test_tensors_that_are_no_arrays_of_numbers_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that they are experimental, or on their way out
        tensors = [
            torch.nested.nested_tensor([torch.zeros(2)], layout=layout) for layout in (torch.jagged, torch.strided)
        ]
        tensors += [torch.empty(2, dtype=dtype) for dtype in QUANTIZED]
    for tensor in tensors:
        with pytest.raises(PayloadError, match=r"a tensor that is (nested|quantized) cannot be sent"):
            make_message(EDGE, "key", tensor)


def test_a_list_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(PayloadError, match="the payload cannot be sent: maximum recursion depth"):
        make_message(EDGE, "key", endless)


def test_a_fallback_takes_apart_what_msgspec_cannot_and_a_hook_puts_it_together() -> None:
    def apart(value: Any) -> Any:
        return {"__complex__": [value.real, value.imag]}

    def together(payload: Any) -> Any:
        return {key: complex(*value["__complex__"]) for key, value in payload.items()}

    for revives in (True, False):
        found = Arrival(sent({"z": 1 + 2j}, fallback=apart, revives=revives)).open(together)
        assert found == ({"z": 1 + 2j} if revives else {"z": {"__complex__": [1.0, 2.0]}})
    assert Arrival(sent({"z": 1 + 2j}, fallback=apart, revives=True)).open() == {"z": {"__complex__": [1.0, 2.0]}}
    with pytest.raises(PayloadError, match="recursion"):
        sent(object(), fallback=lambda value: value)


def test_tensors_and_arrays_are_views_of_the_message() -> None:
    data = sent({"a": torch.arange(5000), "b": [np.arange(7000.0), torch.ones(3000, dtype=torch.bfloat16)]})
    start = ctypes.addressof(ctypes.c_char.from_buffer(data))
    found = Arrival(data).open()
    addresses = [found["a"].data_ptr(), found["b"][0].ctypes.data, found["b"][1].data_ptr()]
    assert all(start <= address < start + len(data) for address in addresses)
    assert [(address - start) % ALIGNMENT for address in addresses] == [0, 0, 0]
    found["a"][0] = 99
    assert Arrival(data).open()["a"][0] == 99


def test_each_buffer_is_copied_once_and_not_before_it_is_written() -> None:
    array, tensor = np.zeros(2000), torch.zeros(2000)
    message = make_message(EDGE, "key", {"a": array, "t": tensor})
    assert (message.payload_bytes, message.longest) == (24000, ("float64", 1))
    array[:], tensor[:] = 1, 2
    found = Arrival(message.to_buffer()).open()
    assert (found["a"].sum(), found["t"].sum()) == (2000, 4000)


def test_a_message_says_how_long_it_is() -> None:
    for payload in (b"", {}, {"x": torch.ones(3, 3)}, [np.ones(1)] * 5):
        message = make_message(EDGE, "key", payload)
        data = message.to_buffer()
        assert len(data) == message.nbytes == Arrival(data + b"more").nbytes
    room = bytearray(10)
    with pytest.raises(ValueError, match="does not fit into 10"):
        message.write_to(memoryview(room), ctypes.addressof(ctypes.c_char.from_buffer(room)))


@pytest.mark.parametrize("key", ["", "a/b", "\0", "x" * 5000, "🔑", "\udc80"], ids=range(6))
def test_who_asks_for_another_message_does_not_get_this_one(key: str) -> None:
    data = make_message(EDGE, key, 1).to_buffer()
    assert Arrival(data, name_of(EDGE, key), 0).open() == 1
    for other in (name_of(EDGE, key + "x"), name_of(Edge("0", "2"), key), name_of(Edge("01", ""), key), b""):
        with pytest.raises(CorruptMessageError, match="a message with another key in place of this one"):
            Arrival(data, other)
    with pytest.raises(CorruptMessageError, match="a message of generation 0 in place of generation 3"):
        Arrival(data, None, 3)


def test_names_of_different_edges_and_keys_are_different() -> None:
    parts = ["", "0", "1", "01", "0/1", "\0", "é"]
    names = {name_of(Edge(a, b), key) for a in parts for b in parts for key in parts}
    assert len(names) == len(parts) ** 3
    assert str(Edge("0", "1")) == "0->1"


@pytest.mark.parametrize("length", [0, 1, 39, 40])
def test_a_stump_is_no_message(length: int) -> None:
    with pytest.raises(CorruptMessageError):
        Arrival(sent({"x": np.ones(3)})[:length])
