"""Reports of receivers to their senders about their share of the cost, as small messages on the way back."""

from __future__ import annotations

import msgspec

from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import Arrival, Message, make_message
from vllm_omni_sched.errors import CorruptMessageError

REPORT_EVERY = 32  # messages of an edge and path
KEY = "omni-sched/report/"


class Report(msgspec.Struct):
    """The last received small and large message: bytes and seconds of the receiver's side."""

    small: tuple[int, float] | None
    large: tuple[int, float] | None


def report_message(edge: Edge, path: str, report: Report) -> Message:
    """Return a report to the senders of ``edge``; a newer report replaces an unread one."""
    return make_message(Edge(edge.target, edge.source), KEY + path, report)


def read_report(arrival: Arrival) -> Report:
    """Return the report in a message.

    Raises:
        CorruptMessageError: it is no report.
    """
    try:
        return msgspec.convert(arrival.open(), Report)
    except msgspec.ValidationError as error:
        raise CorruptMessageError(f"a report of a receiver cannot be read: {error}") from error
