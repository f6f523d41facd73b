"""Record what an engine's core is told and answers, and replay it on another core.

A driver's view is not copied: what the core asks it during an event is recorded, and answered again in the replay. A
core that asks something else has decided differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_omni_sched.core.engine.core import EngineCore

_EVENTS = {
    "": ("enter", "leave", "begin_step", "step_ended", "waiting_request"),
    "ahead": (
        "next_chunk",
        "cut",
        "load",
        "take_actions",
        "attempt_again",
        "encoded",
        "failed",
        "take_failed",
        "lane_is",
        "rest_seconds",
    ),
    "rounds": ("cut", "end"),
}
_ASKED = {"least_itl", "decodes", "prompts", "waiting", "has_encoding", "items_within"}
"""Methods of views and prompts; all else about them are values."""


_SHOWN = object()
"""In place of a view or a prompt."""


class Event(NamedTuple):
    part: str
    name: str
    args: tuple[Any, ...]
    named: dict[str, Any]
    told: dict[str, Any]  # what the view and the prompts answered
    answer: Any


class _Shown:
    """A view or a prompt that records its answers."""

    def __init__(self, real: Any, path: str, told: dict[str, Any]) -> None:
        self._real, self._path, self._told = real, path, told

    def __getattr__(self, name: str) -> Any:
        key, value = f"{self._path}.{name}", getattr(self._real, name)
        if name not in _ASKED:
            self._told[key] = value
            return value

        def ask(*args: Any) -> Any:
            found = value(*args)
            asked = f"{key}{args}"
            if name in ("prompts", "waiting"):
                self._told[asked] = len(found)
                return [_Shown(one, f"{asked}[{i}]", self._told) for i, one in enumerate(found)]
            found = tuple(found) if name == "items_within" else found
            self._told[asked] = found
            return found

        return ask


class _Replayed:
    """A view or a prompt with recorded answers."""

    def __init__(self, path: str, told: dict[str, Any]) -> None:
        self._path, self._told = path, told

    def __getattr__(self, name: str) -> Any:
        key = f"{self._path}.{name}"
        if name not in _ASKED:
            return self._told[key]

        def ask(*args: Any) -> Any:
            found = self._told[f"{key}{args}"]
            if name in ("prompts", "waiting"):
                return [_Replayed(f"{key}{args}[{i}]", self._told) for i in range(found)]
            return found

        return ask


def record(core: EngineCore) -> list[Event]:
    """Record all events of this core from now on."""
    events: list[Event] = []
    for part, names in _EVENTS.items():
        owner = getattr(core, part) if part else core
        for name in names if owner is not None else ():
            setattr(owner, name, _recorded(getattr(owner, name), part, name, events))
    return events


def _recorded(call: Callable[..., Any], part: str, name: str, events: list[Event]) -> Callable[..., Any]:
    def recorded(*args: Any, **named: Any) -> Any:
        told: dict[str, Any] = {}
        shown = [
            _Shown(one, str(i), told) if hasattr(one, "least_itl") or hasattr(one, "items_within") else one
            for i, one in enumerate(args)
        ]
        answer = call(*shown, **named)
        kept = tuple(_SHOWN if isinstance(new, _Shown) else old for old, new in zip(args, shown, strict=True))
        events.append(Event(part, name, kept, named, told, set(answer) if isinstance(answer, set) else answer))
        return answer

    return recorded


def replay(events: list[Event], core: EngineCore) -> int:
    """Tell this core the same events, and return how many; each answer must be the same."""
    for at, event in enumerate(events):
        owner = getattr(core, event.part) if event.part else core
        args = [_Replayed(str(i), event.told) if one is _SHOWN else one for i, one in enumerate(event.args)]
        answer = getattr(owner, event.name)(*args, **event.named)
        assert answer == event.answer, f"event {at}, {event.part}.{event.name}: {answer} instead of {event.answer}"
        core.validate()
    return len(events)
