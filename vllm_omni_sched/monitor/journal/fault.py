"""Entries of the journal of faults, and their form in its file: one line of JSON each."""

import math
from enum import Enum

import msgspec

from vllm_omni_sched.config.errors import ConfigError

MOST_TEXT = 500
"""Characters of a cause or a name that are kept, so that an entry is bounded."""


class FaultKind(str, Enum):
    """What an entry is about, beside the kinds of `IncidentKind`, `AnomalyKind` and `RemedyStep`."""

    STARTED = "started"  # the pipeline
    STOPPED = "stopped"
    KILLED = "killed"  # a replica that hung
    REDISPATCHED = "redispatched"  # requests run again on another replica, or on the one that came back
    FAILED = "failed"  # requests were answered with an error
    ENTRIES_LOST = "entries_lost"  # of this journal, because it could not be written


class Fault(msgspec.Struct, omit_defaults=True, frozen=True):
    """An entry of the journal.

    ``at``: wall-clock time, in seconds since 1970. ``kind``: of one of these four.
    ``stage``, ``name``, ``replica``: what it concerns; -1 and "" for none. ``requests``: how many requests it affects.
    ``request_id``: the request, or the first of them. ``seconds``: since the outage or the anomaly began, by a
    monotonic clock.
    """

    at: float
    kind: str
    stage: int = -1
    name: str = ""
    replica: int = -1
    requests: int = 0
    request_id: str = ""
    seconds: float | None = None
    cause: str = ""
    evidence: dict[str, float] = {}


def line_of(fault: Fault) -> bytes:
    """Return the line of an entry, with its end."""
    kept = msgspec.structs.replace(
        fault,
        name=_text(fault.name),
        request_id=_text(fault.request_id),
        cause=_text(fault.cause),
        evidence={name: value for name, value in fault.evidence.items() if math.isfinite(value)},
    )
    return msgspec.json.encode(kept) + b"\n"


def _text(text: str) -> str:
    """Return a text that can be written, and is bounded."""
    return text[:MOST_TEXT].encode("utf-8", "replace").decode("utf-8")


def fault_of(line: bytes) -> Fault:
    """Return the entry of a line.

    Raises:
        ConfigError: it is none.
    """
    try:
        return msgspec.json.decode(line, type=Fault)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"not an entry of a journal of faults: {error}") from None
