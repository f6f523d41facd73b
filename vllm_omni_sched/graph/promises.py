"""Read the SLA class and targets that a request sets for itself, and build the classes with the targets of the options.

A request sets them in ``vllm_xargs`` of an OpenAI request (``SamplingParams.extra_args``)::

    {"omni_class": "batch"}
    {"omni_class": "interactive", "omni_ttft_ms": 800, "omni_itl_ms": 60}
"""

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from vllm_omni_sched.config.errors import RequestError
from vllm_omni_sched.config.nearest import did_you_mean, is_misspelt
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.graph.order import BATCH, INTERACTIVE, REALTIME, SlaClass


def classes_of(config: OmniSchedConfig) -> dict[str, SlaClass]:
    """Return the SLA classes by name, with the targets of ``config``."""
    realtime = replace(REALTIME, ttft_seconds=config.realtime_ttft_ms / 1e3, itl_seconds=config.realtime_itl_ms / 1e3)
    interactive = replace(
        INTERACTIVE, ttft_seconds=config.interactive_ttft_ms / 1e3, itl_seconds=config.interactive_itl_ms / 1e3
    )
    return {one.name: one for one in (realtime, interactive, BATCH)}


PREFIX = "omni_"
CLASS, TTFT, ITL, USER = "omni_class", "omni_ttft_ms", "omni_itl_ms", "omni_user"
KNOWN = (CLASS, TTFT, ITL, USER)
"""All of our keys that a request may have; ``omni_user`` is read by the scheduler of vLLM-Omni's stages."""

_TARGETS = {TTFT: "ttft_seconds", ITL: "itl_seconds"}
_MOST = sys.float_info.max
_SHOWN = 64  # most characters of a client's value that are repeated to it


class Promises:
    """Reads the class and targets that requests ask for, and refuses those that are invalid or not allowed.

    1. A key that begins with ``omni_`` and is not in `KNOWN` is refused. With `shared`, it is refused only if it is
       close to a known key: other software has keys with the same prefix there.
    2. A class must be one that clients may name. A target must be a number of milliseconds, and not below its bound.
    3. All other keys are ignored.

    Args:
        classes: all classes, by name.
        named: the classes that clients may name.
        least_ms: the least target that clients may ask for, by key; 0 for any.
        option: name of the option that lists the classes clients may name, for messages.
        shared: whether other software uses the prefix ``omni_``, too.
    """

    def __init__(
        self,
        classes: Mapping[str, SlaClass],
        named: Collection[str],
        least_ms: Mapping[str, float],
        *,
        option: str,
        shared: bool = False,
    ) -> None:
        self.classes = classes
        self._named = [name for name in classes if name in named]
        self._least_ms, self._option, self._shared = least_ms, option, shared

    def check(self, extra: Any) -> None:
        """Refuse a request that a client may not make; `extra` is its ``extra_args``.

        Raises:
            RequestError: the message says which key is wrong, why, and what is allowed.
        """
        if not extra or not isinstance(extra, Mapping):
            return
        for key in extra:
            if isinstance(key, str) and key.startswith(PREFIX) and key not in KNOWN:
                self._refuse_unknown(key)
        self.classify(extra, next(iter(self.classes.values())))
        if CLASS in extra and extra[CLASS] not in self._named:
            raise RequestError(
                f"{CLASS} is {extra[CLASS]!r}, which clients of this server may not ask for (option "
                f"{self._option!r}): {self._choice()}"
            )
        for key in _TARGETS:
            if key in extra and extra[key] < (least := self._least_ms.get(key, 0.0)):
                raise RequestError(
                    f"{key} must be {least:g} or more on this server (option 'client_{key.removeprefix(PREFIX)}_min'), "
                    f"got {extra[key]:g}"
                )
        user = extra.get(USER)
        if user is not None and (isinstance(user, bool) or not isinstance(user, str | int)):
            raise RequestError(f"{USER} must be text or a whole number, got {_shown(user)}")

    def classify(self, extra: Mapping[str, Any], usual: SlaClass) -> SlaClass:
        """Return the class of a request, with its own targets; that is `usual` for one that names none.

        Whether a client may name that class is not checked here.

        Raises:
            RequestError: there is no such class, or a target is not a number of milliseconds.
        """
        sla = usual
        if CLASS in extra:
            name = extra[CLASS]
            if not isinstance(name, str) or name not in self.classes:
                hint = did_you_mean(str(name)[:_SHOWN], self._named)
                choice = f"{self._choice()}; {hint}" if hint else self._choice()
                raise RequestError(f"{CLASS} is {_shown(name)}, which is not an SLA class: {choice}")
            sla = self.classes[name]
        for key, field in _TARGETS.items():
            if key in extra:
                value = extra[key]
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST:
                    raise RequestError(f"{key} must be a number of milliseconds above 0, got {_shown(value)}")
                change: dict[str, Any] = {field: value / 1e3}
                sla = replace(sla, **change)
        return sla

    def _choice(self) -> str:
        return f"it must be one of {', '.join(self._named)}" if self._named else "leave it out"

    def _refuse_unknown(self, key: str) -> None:
        if self._shared and not is_misspelt(key, KNOWN):
            return
        hint = did_you_mean(key, KNOWN)
        known = f"known keys are {', '.join(KNOWN)}"
        raise RequestError(f"unknown key {_shown(key)}: {f'{hint} {known}' if hint else known}")


def promises_of(config: OmniSchedConfig) -> Promises:
    """Return the reader of client promises for an engine with these options."""
    return Promises(
        classes_of(config),
        [name.value for name in config.client_classes],
        {
            TTFT: config.realtime_ttft_ms if config.client_ttft_ms_min is None else config.client_ttft_ms_min,
            ITL: config.realtime_itl_ms if config.client_itl_ms_min is None else config.client_itl_ms_min,
        },
        option="client_classes",
    )


def usual_class(classes: Mapping[str, SlaClass], *, session: bool) -> SlaClass:
    """Return the class of a request that names none: streaming sessions are realtime, all others interactive."""
    return classes[REALTIME.name if session else INTERACTIVE.name]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
