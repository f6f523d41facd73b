"""Make the input of a stage that reads several others of the outputs of all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


class JoinedOutput:
    """Stands for the outputs of all stages that a stage reads, where vLLM-Omni passes on that of one.

    It has the attributes of the output that came last.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.joined_outputs = list(outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.joined_outputs[-1], name)


def expanded(outputs: Sequence[Any]) -> list[Any]:
    """Return the outputs with the members of each `JoinedOutput` in its place."""
    found: list[Any] = []
    for output in outputs:
        found += output.joined_outputs if isinstance(output, JoinedOutput) else [output]
    return found


def take_joined_outputs(client: Any) -> None:
    """Let the functions of a client that make the input of its stage get all outputs that it reads."""
    for name in ("process_engine_inputs", "custom_process_input_func"):
        original = getattr(client, name, None)
        if original is not None and not hasattr(original, "__joins__"):
            setattr(client, name, _joining(original))


def _joining(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def joining(outputs: Sequence[Any], *others: Any, **more: Any) -> Any:
        return original(expanded(outputs), *others, **more)

    joining.__joins__ = True  # type: ignore[attr-defined]
    return joining
