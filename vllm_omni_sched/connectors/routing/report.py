"""What a receiver tells its senders: how long its side took. Small messages on the way back."""

from __future__ import annotations

import msgspec

from vllm_omni_sched.connectors.base import Edge
from vllm_omni_sched.connectors.framing import Arrival, Message, make_message
from vllm_omni_sched.errors import CorruptMessageError

REPORT_EVERY = 32  # messages of an edge and path
KEY = "omni-sched/report/"


class Report(msgspec.Struct):
    """One message that was got, by its size: bytes and seconds of the receiver's side."""

    small: tuple[int, float] | None
    large: tuple[int, float] | None


def report_message(edge: Edge, path: str, report: Report) -> Message:
    """To the senders of ``edge``; a newer one takes the place of one that was not read."""
    return make_message(Edge(edge.target, edge.source), KEY + path, report)


def read_report(arrival: Arrival) -> Report:
    """What was reported.

    Raises:
        CorruptMessageError: it is no report.
    """
    try:
        return msgspec.convert(arrival.open(), Report)
    except msgspec.ValidationError as error:
        raise CorruptMessageError(f"a report of a receiver cannot be read: {error}") from error
