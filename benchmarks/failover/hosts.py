"""Rounds of faults of a whole host and of its link: hosts are namespaces, and payloads cross them by Mooncake.

The front end and the first stage are on one host. A replica of the second stage is on each of two others; the last one
is the standby of the other, which has the faults.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.failover.load import REQUESTS, Round, asked_again
from benchmarks.stages.load import Request, alike
from benchmarks.stages.record import Bar, entry
from dev.omni_cpu.asking import Ask
from dev.omni_cpu.spec import TEXT_TO_TEXT, PipelineSpec
from tests.omni.harness.hosts import Hosts
from tests.support import hosts as namespaces
from tests.support import mooncake
from tests.support.hosts import Host

KINDS = ("whole host", "link cut")
STAGE = 1
STANDBY = f"{namespaces.PREFIX}.3"
TIMEOUT_SECONDS = 1.0  # without a heartbeat, of which there is one every quarter of a second
MOST_SECONDS = 2.0  # until the standby serves, beyond its start; it is started already
UNTIL_SECONDS = 100.0  # then a request hangs, and a host does not come back
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Failover:
    """A fault of one host, in seconds after it.

    ``noticed``: its replica is no longer in the pool. ``taken_over``: the standby runs its first request. ``back``: the
    host serves again, by a new process if it was killed.
    """

    kind: str
    noticed: float
    taken_over: float
    back: float


def why_not() -> str:
    """Return why there can be no hosts on this machine; "" if there can."""
    return namespaces.why_not() or mooncake.why_not()


class Cluster:
    """The pipeline on its hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.main, self.standby = hosts.network.host(), hosts.network.host()
        assert self.standby.address == STANDBY
        hosts.start_front_end()
        for host in (self.main, self.standby):
            hosts.start_stage(host)
        hosts.wait_for_front_end()
        self.wait(lambda: len(self.serving()) == 2)

    def serving(self) -> dict[str, int]:
        """Return the replicas of the second stage that serve, by host."""
        return {address: number for number, address in self._hosts.front_end.replicas()[STAGE].items()}

    def running(self, host: Host) -> int:
        """Return how many requests the replica of a host runs; 0 if it has none."""
        number = self.serving().get(host.address)
        return int(self._hosts.front_end.running(STAGE).get(number, 0)) if number is not None else 0

    def ask(self, requests: list[Request]) -> None:
        name = requests[0].name
        self._hosts.front_end.ask(name, {one.name: Ask(one.prompt, one.thinks, one.says) for one in requests})

    def told(self, requests: list[Request]) -> list[dict[str, Any]]:
        """Return the answers to `ask`, in the form of `benchmarks.failover.serve`."""
        name = requests[0].name
        if self.wait(lambda: self._hosts.front_end.is_answered(name)) is None:
            return [{"answer": None, "ends": {}, "error": "no answer in time", "hangs": True} for _ in requests]
        answers = self._hosts.answers_of(name)
        found = []
        for one in requests:
            got = answers[one.name]
            error = got["text"].get("error")
            answer = None if error else {"text": got["text"]}
            found.append({"answer": answer, "ends": got["ends"], "error": error, "hangs": False})
        return found

    def fault(self, kind: str) -> None:
        """Cut the link of the host; its processes are killed after that, so that nobody is told, or live on."""
        self.main.cut()
        if kind == "whole host":
            self.main.kill()

    def mend(self, kind: str) -> None:
        self.main.mend()
        if kind == "whole host":
            self._hosts.start_stage(self.main)

    def wait(self, condition: Callable[[], Any]) -> float | None:
        """Wait until a condition holds; return the time then, None if it took too long."""
        until = time.monotonic() + UNTIL_SECONDS
        while not condition():
            if time.monotonic() > until:
                return None
            time.sleep(POLL_SECONDS)
        return time.monotonic()


@contextlib.contextmanager
def cluster(model: Path, folder: Path, journal: Path, seqs: int) -> Iterator[Cluster]:
    """Start the pipeline; it has ended when the context ends."""
    options = {
        "runtime": {"hosts": {"standby": [STANDBY]}, "recovery": {"max_redispatches": 9}},
        "monitoring": {"journal": {"path": str(journal)}},
    }
    spec = PipelineSpec(TEXT_TO_TEXT, "full_payload", scheduling=options, max_num_seqs=seqs)
    with Hosts(spec, model, folder, mooncake=True, omni_heartbeat_timeout=TIMEOUT_SECONDS) as hosts:
        yield Cluster(hosts)


def play(one: Cluster, kind: str, rng: Random) -> tuple[Round, Failover | None]:
    """Ask the same requests twice: undisturbed, and with a fault while the host runs several of them."""
    requests = alike(REQUESTS, rng, thinks=6, says=120)
    one.ask(requests)
    undisturbed = one.told(requests)
    again = asked_again(requests)
    one.ask(again)
    one.wait(lambda: one.running(one.main) > 1)
    wall, began = time.time(), time.monotonic()
    one.fault(kind)
    noticed = one.wait(lambda: one.main.address not in one.serving())
    taken_over = one.wait(lambda: one.running(one.standby))
    told = one.told(again)
    one.mend(kind)
    back = one.wait(lambda: len(one.serving()) == 2)
    wave = {"told": told, "at": wall, "back": back is not None}
    played = {"kind": kind, "replicas": [0], "wave": wave, "undisturbed": {"told": undisturbed}}
    if noticed is None or taken_over is None or back is None:
        return played, None
    return played, Failover(kind, noticed - began, taken_over - began, back - began)


def record(task: str, found: Sequence[Failover | None]) -> list[dict[str, Any]]:
    """Return the times by kind of fault; None: the standby did not take over, or the host did not come back."""
    records = []
    if found:
        label = "faults of hosts after which not all was as before"
        records.append(entry(task, label, [found.count(None)], unit="faults", bar=Bar(0, "worst")))
    for kind in KINDS:
        own = [one for one in found if one is not None and one.kind == kind]
        if own:
            records.append(entry(task, f"{kind}: until its silence was noticed", [one.noticed for one in own]))
            label, bar = f"{kind}: until the standby ran its requests", Bar(MOST_SECONDS, "worst")
            records.append(entry(task, label, [one.taken_over for one in own], bar=bar))
            records.append(entry(task, f"{kind}: until the host served again", [one.back for one in own]))
    return records
