"""Read the fields of a ``config.json`` with their types; an error names the file, the field, its value and the fix."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from vllm_omni_sched.config.errors import ConfigError

_LARGEST = 10**9
"""No number of a shape is above it: not the tokens of a context, nor the entries of a vocabulary."""


class Fields:
    """Reads the fields of a table of a ``config.json``; what the table leaves out has the value in ``defaults``.

    A field that is null is left out, unless its default is not null: then null is its value. Fields that were read are
    remembered, for `unread`.
    """

    def __init__(self, table: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> None:
        self._given, self._table = table, {**(defaults or {}), **table}
        self._read: set[str] = set()
        self.where = where

    def all(self) -> Mapping[str, Any]:
        """Return the table without defaults."""
        return self._given

    def get(self, name: str) -> Any:
        """Return the value of a field, whatever its type; None if it is left out."""
        self._read.add(name)
        return self._table.get(name)

    def has(self, name: str) -> bool:
        """Return whether a field has a value."""
        return self.get(name) is not None

    def unread(self) -> list[str]:
        """Return the fields of the table, but not its defaults, that nobody has read and that are not empty or off."""
        return sorted(name for name, value in self._given.items() if value and name not in self._read)

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number above 0.

        Raises:
            ConfigError: it is missing and has no default, or is no such number.
        """
        return self._whole(name, default, 1, "a whole number above 0")

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number, 0 or more.

        Raises:
            ConfigError: it is missing and has no default, or is no such number.
        """
        return self._whole(name, default, 0, "a whole number of 0 or more")

    def _whole(self, name: str, default: int | None, least: int, kind: str) -> int:
        value = self.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.where}: the field {name!r} is missing, and the costs need it: copy it from "
                                  "the config.json of the model's repository")  # fmt: skip
            return default
        if not _is_whole(value, least):
            self._refuse(name, kind)
        return int(value)

    def flag(self, name: str) -> bool:
        """Return whether a field is true; it is false if it is left out.

        Raises:
            ConfigError: it is neither true nor false.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self._refuse(name, "true or false")
        return bool(value)

    def word(self, name: str) -> str:
        """Return a string; empty if it is left out.

        Raises:
            ConfigError: it is no string.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            self._refuse(name, "a string")
        return value or ""

    def fraction(self, name: str, default: float) -> float:
        """Return a number above 0, at most 1.

        Raises:
            ConfigError: it is no such number.
        """
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-3 <= value <= 1:
            self._refuse(name, "a number from 0.001 to 1")
        return float(value)

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers of 0 or more; empty if it is left out.

        Raises:
            ConfigError: it is no such list.
        """
        value = self.get(name)
        if value is not None and not (isinstance(value, list | tuple) and all(_is_whole(one, 0) for one in value)):
            self._refuse(name, "a list of whole numbers of 0 or more")
        return tuple(value or ())

    def words(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; empty if it is left out.

        Raises:
            ConfigError: it is no such list.
        """
        value = self.get(name)
        if value is not None and not (isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)):
            self._refuse(name, "a list of strings")
        return tuple(value or ())

    def side(self, name: str, default: int | None = None) -> int:
        """Return the side of a square: a whole number above 0, or a list of two equal ones.

        Raises:
            ConfigError: it is missing and has no default, or is no such number, or the sides differ.
        """
        value = self.get(name)
        if isinstance(value, list | tuple):
            if len(value) != 2 or not all(_is_whole(one, 1) for one in value) or value[0] != value[1]:
                self._refuse(name, "a whole number above 0, or two equal ones")
            return int(value[0])
        return self.count(name, default)

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table inside this one; empty if it is left out.

        Raises:
            ConfigError: it is no table.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            self._refuse(name, "an object with fields")
        return value or {}

    def _refuse(self, name: str, kind: str) -> None:
        raise ConfigError(f"{self.where}: the field {name!r} must be {kind}, got {reprlib.repr(self._table[name])}: "
                          "correct it from the config.json of the model's repository")  # fmt: skip


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST
