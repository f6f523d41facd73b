"""Apply values that override those in the file, by dotted keys."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

from vllm_omni_sched.config.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def value_of(text: str) -> Any:
    """Return a value written in TOML; anything else is text, so that quotes may be left out."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by dotted keys; an empty table is a value.

    So ``{"policy.encode_ahead": true}`` and ``{"policy": {"encode_ahead": true}}`` are the same.
    """
    return dict(_flatten(tables, prefix))


def _flatten(tables: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values by dotted keys; of equal keys the last one, at its later place.

    `apply` keeps that order, so a later ``stages.llm.replicas`` changes a list ``stages`` that was set before it.
    """
    found: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            found.pop(key, None)
            found[key] = value
    return found


def within(key: str, given: Iterable[str]) -> bool:
    """Return whether a dotted key is one of the given ones or inside one: `stages.llm.replicas` is within `stages`."""
    return any(key == one or key.startswith(f"{one}.") for one in given)


def apply(raw: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a copy in which each dotted key has its new value. List entries are named by their ``name`` or number.

    Raises:
        ConfigError: a key leads through a value that is no table, or names an entry that does not exist.
    """
    changed = deepcopy(dict(raw))
    for key, value in flatten(overrides).items():
        _set(changed, key, deepcopy(value), where)
    return changed


def _set(tables: dict[str, Any], key: str, value: Any, where: str) -> None:
    parts = key.split(".")
    if not all(parts):
        raise ConfigError(f"{where}: '{key}' is not a dotted key such as 'stages.llm.replicas'")
    at: Any = tables
    for depth, part in enumerate(parts[:-1]):
        at = _entry(at, part, ".".join(parts[:depth]), where) if isinstance(at, list) else at.setdefault(part, {})
        if not isinstance(at, (dict, list)):
            raise ConfigError(f"{where}: '{key}' cannot be set: '{'.'.join(parts[: depth + 1])}' is {at!r}, no table")
    if isinstance(at, list):
        inside = ".".join(parts[:-1])
        _entry(at, parts[-1], inside, where)
        raise ConfigError(f"{where}: '{key}' is an entry; name a key of it, such as '{key}.name'")
    at[parts[-1]] = value


def _entry(entries: list[Any], part: str, inside: str, where: str) -> Any:
    """Return the entry with that name or number."""
    names = {str(one.get("name", at)): one for at, one in enumerate(entries) if isinstance(one, dict)}
    if part in names:
        return names[part]
    if part.isdigit() and int(part) < len(entries):
        return entries[int(part)]
    near = get_close_matches(part, names, n=1, cutoff=0.4)
    hint = f"did you mean '{inside}.{near[0]}'?" if near else f"there are {', '.join(names) or 'none'}"
    raise ConfigError(f"{where}: there is no '{inside}.{part}'; {hint}")
