"""Find the first place where two nested values differ, with both of its values."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Collection, Mapping, Sequence, Set
from functools import cache
from typing import Any

import torch

ABSENT = "<absent>"
ATOMS = {int, str, bytes, bool, float}


@dataclasses.dataclass(frozen=True)
class Difference:
    path: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.path}\n  stock: {_short(self.left)}\n  ours:  {_short(self.right)}"


def first_difference(left: Any, right: Any, path: str = "", ignore: Collection[str] = ()) -> Difference | None:
    """Return the first difference, or None.

    `left` says what is compared: its fields (not those that a subclass on the right adds), its kind of collection (a
    list equals any sequence of the same values). Fields named in `ignore` are passed over at any depth.
    """
    if left is right or (type(left) in ATOMS and left == right):
        return None
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        same = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left, right)
        return None if same else Difference(path, left, right)
    if names := _field_names(type(left)):
        return _first_of_fields(left, right, path, ignore, names)
    if isinstance(left, Mapping):
        return _first_of_mappings(left, right, path, ignore)
    if isinstance(left, Set):
        return None if isinstance(right, Set) and set(left) == set(right) else Difference(path, left, right)
    if _is_sequence(left):
        return _first_of_sequences(left, right, path, ignore)
    return None if left == right else Difference(path, left, right)


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return getattr(kind, "__struct_fields__", ())  # msgspec: engine outputs, KV events


def _first_of_fields(
    left: Any, right: Any, path: str, ignore: Collection[str], names: tuple[str, ...]
) -> Difference | None:
    for name in names:
        if name in ignore:
            continue
        there = getattr(right, name, ABSENT)
        if found := first_difference(getattr(left, name), there, f"{path}.{name}", ignore):
            return found
    return None


def _first_of_mappings(left: Mapping[Any, Any], right: Any, path: str, ignore: Collection[str]) -> Difference | None:
    if not isinstance(right, Mapping):
        return Difference(path, left, right)
    for key in [*left, *(key for key in right if key not in left)]:
        if found := first_difference(left.get(key, ABSENT), right.get(key, ABSENT), f"{path}[{key!r}]", ignore):
            return found
    return None


def _first_of_sequences(left: Sequence[Any], right: Any, path: str, ignore: Collection[str]) -> Difference | None:
    if not _is_sequence(right) or len(left) != len(right):
        return Difference(path, left, right)
    if left and _is_plain(left[0]) and list(left) == list(right):
        return None  # the common case of long lists, at the speed of the interpreter
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        if found := first_difference(one, other, f"{path}[{index}]", ignore):
            return found
    return None


def _is_plain(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(one, int | str | bytes) for one in values)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple | array | range)


def _short(value: Any, limit: int = 600) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
