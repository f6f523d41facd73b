"""Detection of messages that stay too long. Pure: traffic and time in, findings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_sched.connectors.bounds import Seconds
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.transport import InFlight, Traffic


class WatchOptions(BaseModel):
    """Options of the watch. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stall_seconds: Seconds = Field(
        10.0,
        gt=0,
        description="Time without a received message, while messages are put, after which an edge is stalled.",
    )
    leak_seconds: Seconds = Field(
        300.0, gt=0, description="Time after which a message that is held, or was not received, counts as leaked."
    )


class Alarm(str, Enum):
    """Reports a problem of an edge."""

    STALL = "stall"  # messages are put, and none is received
    HELD = "held"  # receivers keep messages that they have received
    UNCLAIMED = "unclaimed"  # later messages were received before them, or they have waited for long


ADVICE = {
    Alarm.STALL: "its receiver hangs, is stopped or overloaded: look at the stage that it leads to",
    Alarm.HELD: "their receiver keeps views of them: set `copy_out`, or let go of the tensors",
    Alarm.UNCLAIMED: "nobody asks for them, as after an aborted request; they go after `ttl_seconds`",
}


@dataclass(frozen=True)
class Finding:
    """Alarm with the number and bytes of an edge's messages, and the age of the oldest."""

    alarm: Alarm
    transport: str
    edge: Edge
    messages: int
    nbytes: int
    oldest_seconds: Seconds

    @property
    def where(self) -> tuple[Alarm, str, Edge]:
        """Return the key by which a finding is the same as an earlier one."""
        return self.alarm, self.transport, self.edge

    def __str__(self) -> str:
        return (
            f"{self.alarm.value} on edge {self.edge} ({self.transport}): {self.messages} messages, "
            f"{self.nbytes} bytes, the oldest for {self.oldest_seconds:.0f} s; {ADVICE[self.alarm]}"
        )


class Watch:
    """Watch that remembers findings, so that each occurrence is reported once.

    1. An edge is *stalled* when a message has waited for `stall_seconds`, another was put after it, and none was got
       since. It remains so until one is got or none waits. Messages of before do not count: they may have been left
       behind by requests that were aborted, so an edge on which nothing is put is not stalled.
    2. Messages are *held* when their receiver has had them for `leak_seconds`.
    3. A message is *unclaimed* when it has waited for `leak_seconds`, and one that was put later was got, or none was
       got for that long.
    """

    def __init__(self, options: WatchOptions) -> None:
        self.options = options
        self.current: dict[tuple[Alarm, str, Edge], Finding] = {}
        self.counts: Counter[tuple[Alarm, Edge]] = Counter()  # of occurrences

    def look(self, traffic: Mapping[tuple[str, Edge], Traffic], now: float) -> list[Finding]:
        """Return the findings that are new."""
        stalled = {(transport, edge) for alarm, transport, edge in self.current if alarm is Alarm.STALL}
        found = {one.where: one for one in findings(traffic, self.options, stalled, now)}
        new = [one for where, one in found.items() if where not in self.current]
        self.counts.update((one.alarm, one.edge) for one in new)
        self.current = found
        return new


def findings(
    traffic: Mapping[tuple[str, Edge], Traffic],
    options: WatchOptions,
    stalled: Collection[tuple[str, Edge]],
    now: float,
) -> list[Finding]:
    """Return all findings, by the rules of `Watch`; ``stalled`` are the edges that were stalled before."""
    found = []
    for (transport, edge), one in traffic.items():
        stuck = {
            Alarm.STALL: _stalled(one, options.stall_seconds, (transport, edge) in stalled, now),
            Alarm.HELD: [held for held in one.held if now - held.since > options.leak_seconds],
            Alarm.UNCLAIMED: _unclaimed(one, options.leak_seconds, now),
        }
        found += [
            Finding(
                alarm,
                transport,
                edge,
                len(some),
                sum(m.nbytes for m in some),
                now - min(message.since for message in some),
            )
            for alarm, some in stuck.items()
            if some
        ]
    return found


def _stalled(traffic: Traffic, seconds: float, before: bool, now: float) -> Sequence[InFlight]:
    if traffic.got_at is not None and now - traffic.got_at <= seconds:
        return ()
    if before:
        return traffic.waiting
    recent = [message for message in traffic.waiting if now - message.since <= 2 * seconds]
    oldest = min((message.since for message in recent), default=now)
    come_since = any(message.since > oldest for message in recent)
    return recent if now - oldest > seconds and come_since else ()


def _unclaimed(traffic: Traffic, seconds: float, now: float) -> Sequence[InFlight]:
    nobody_asks = traffic.got_at is None or now - traffic.got_at > seconds
    overtaken = float("-inf") if traffic.got_put_at is None else traffic.got_put_at
    return [m for m in traffic.waiting if now - m.since > seconds and (nobody_asks or m.since < overtaken)]
