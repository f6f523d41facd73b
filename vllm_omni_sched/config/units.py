"""Sizes and durations that are written with a unit, such as `256MB` and `1000ms`."""

import re
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", re.IGNORECASE)
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min|h|d)\s*", re.IGNORECASE)
_SECONDS = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}


class UnitError(ValueError):
    """A text that is no size or no duration."""


def bytes_of(value: Any) -> Any:
    """Convert a size such as ``512MB``, ``"64 MiB"`` or ``1g`` to bytes; units are powers of 1024, as in vLLM-Omni.

    Anything but text is returned as it is.

    Raises:
        UnitError: the text is no size.
    """
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value)
    if found is None:
        raise UnitError(f"{value!r} is not a size: give bytes, or a number with KB, MB, GB or TB")
    return int(Fraction(found[1]) * _SIZES[found[2].lower()])  # a float overflows


def seconds_of(value: Any) -> Any:
    """Convert a duration such as ``50ms``, ``1s`` or ``2h`` to seconds; anything but text is returned as it is.

    Raises:
        UnitError: the text is no duration.
    """
    return value if not isinstance(value, str) else float(_duration(value, "seconds"))


def milliseconds_of(value: Any) -> Any:
    """Convert a duration to milliseconds, like `seconds_of`."""
    return value if not isinstance(value, str) else float(_duration(value, "milliseconds") * 1000)


def _duration(text: str, unit: str) -> Fraction:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise UnitError(f"{text!r} is not a duration: give a number of {unit}, or one with ms or s, such as 50ms")
    return Fraction(found[1]) * _SECONDS[found[2].lower()]


Bytes = Annotated[int, BeforeValidator(bytes_of)]
"""A number of bytes, which may be written with a unit."""
FractionalBytes = Annotated[float, BeforeValidator(bytes_of)]
"""A number of bytes that need not be whole: a mean, or those of a second."""
Milliseconds = Annotated[float, BeforeValidator(milliseconds_of)]
"""A number of milliseconds, which may be written with a unit."""
