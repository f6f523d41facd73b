"""Suggest names for one that is unknown."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches

_MOST = 3
_ALIKE, _NEARLY_SAME = 0.6, 0.8


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that may be meant: one that is spelled alike, and those that begin with it.

    Where some begin with it, one of the others is only returned if it is nearly the same.
    """
    names = list(known)
    begun = sorted((one for one in names if len(name) > 1 and one.lower().startswith(name.lower())), key=len)
    alike = get_close_matches(name, names, n=1, cutoff=_NEARLY_SAME if begun else _ALIKE)
    return list(dict.fromkeys([*alike, *begun]))[:_MOST]


def is_misspelt(name: str, known: Iterable[str]) -> bool:
    """Return whether a name, which others may use as well, is nearly one of the known ones."""
    return bool(get_close_matches(name, list(known), n=1, cutoff=_NEARLY_SAME))


def did_you_mean(name: str, known: Iterable[str], written: Callable[[str], str] = str) -> str:
    """Return a question with the names that may be meant, empty if none is near.

    Args:
        written: gives a known name as the user writes it, such as with the key of its table.
    """
    found = [written(one) for one in nearest(name, known)]
    return f"did you mean {' or '.join(map(repr, found))}?" if found else ""
