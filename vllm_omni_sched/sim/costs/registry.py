"""Look up a thing by the name that a scenario gives."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from vllm_omni_sched.errors import ConfigError

_Thing = TypeVar("_Thing")


def pick(what: str, name: str, known: Mapping[str, _Thing]) -> _Thing:
    """Return the thing with that name.

    Raises:
        ConfigError: there is none; the message names the nearest, and all.
    """
    found = known.get(name)
    if found is not None:
        return found
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"unknown {what} {name!r}: {hint}known are {', '.join(sorted(known))}")
