"""Validators of fields that several groups of options use."""

from collections.abc import Mapping
from typing import Any


def absolute(value: str | None, example: str) -> str | None:
    """Return a path that is absolute, or None.

    Raises:
        ValueError: it is not.
    """
    if value is not None and not value.startswith("/"):
        raise ValueError(f"must be absolute, such as {example!r}")
    return value


def whole_as_float(value: Any) -> Any:
    """Return a whole number as a float, which strict options expect, and anything else as it is."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def keys_as_text(value: Any) -> Any:
    """Return a mapping with its keys as text, and anything else as it is; YAML reads the id of a stage as a number."""
    return {str(key): inner for key, inner in value.items()} if isinstance(value, Mapping) else value
