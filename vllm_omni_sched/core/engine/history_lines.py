"""Lines of a file with the history of requests: one transition each, as JSON."""

import msgspec

from vllm_omni_sched.config.errors import ConfigError

MOST_TEXT = 500
"""Characters of a detail or an id that are kept, so that a line is bounded."""
LINES_LOST = "lines_lost"
"""In place of a transition: lines of this file that could not be written; detail: how many."""


class HistoryLine(msgspec.Struct, omit_defaults=True, frozen=True):
    """One transition of a request.

    ``at``: seconds since 1970, by the wall clock when the file was opened, and from then on by the monotonic clock.
    ``transition``: the value of a `Transition`, or `LINES_LOST`.
    """

    at: float
    transition: str
    request_id: str = ""
    detail: str = ""


def line_of(entry: HistoryLine) -> bytes:
    """Return the line of an entry, with its end."""
    kept = msgspec.structs.replace(entry, request_id=_text(entry.request_id), detail=_text(entry.detail))
    return msgspec.json.encode(kept) + b"\n"


def _text(text: str) -> str:
    """Return a text that can be written, and is bounded."""
    return text[:MOST_TEXT].encode("utf-8", "replace").decode("utf-8")


def entry_of(line: bytes) -> HistoryLine:
    """Return the entry of a line.

    Raises:
        ConfigError: it is none.
    """
    try:
        return msgspec.json.decode(line, type=HistoryLine)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a line of a history of requests: {error}") from None
