"""Rounds of faults in a pipeline that runs; the journal of faults tells how long each outage of a replica took."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.failover import hosts
from benchmarks.failover.load import REQUESTS, Round, asked_again
from benchmarks.harness.child import Child
from benchmarks.harness.screen import console
from benchmarks.stages.load import alike
from benchmarks.stages.record import Bar, different, entry
from dev.omni_cpu.distribution import environment
from dev.omni_cpu.spec import TEXT_TO_TEXT, PipelineSpec
from vllm_omni_sched.monitor.journal.fault import Fault, fault_of

TASK = "faults"
SEQS, REPLICATED = 8, 1
HANG_SECONDS = 2.0
KINDS = ("killed", "stopped", "all killed")
MOST_SECONDS = 2.0  # until a replica serves again, beyond what its start takes


@dataclass(frozen=True)
class Outage:
    """An outage of one replica, in seconds.

    ``noticed``: from the signal until its death was noticed. ``back``: from the signal until it served again.
    ``start``: of that, its start. ``after_death``: from its noticed death until it served again.
    """

    kind: str
    noticed: float
    back: float
    start: float
    after_death: float


def run(model: Path, rounds: int, rng: Random) -> list[dict[str, Any]]:
    """Run the rounds, with each kind of fault in as many of them: first those of replicas, then those of hosts."""
    folder = Path(tempfile.mkdtemp(prefix="failover-"))
    all_kinds = KINDS if (reason := hosts.why_not()) else (*KINDS, *hosts.KINDS)
    if reason:
        console.print(f"without the faults of hosts: {reason}")
    kinds = [all_kinds[number % len(all_kinds)] for number in range(rounds)]
    try:
        journal, of_hosts = folder / "faults.jsonl", folder / "faults-of-hosts.jsonl"
        with pipeline(model, folder, journal) as child:
            played = [play(child, kind, rng) for kind in kinds if kind in KINDS]
        pairs = []
        if of_host := [kind for kind in kinds if kind in hosts.KINDS]:
            (folder / "hosts").mkdir()
            with hosts.cluster(model, folder / "hosts", of_hosts, SEQS) as cluster:
                pairs = [hosts.play(cluster, kind, rng) for kind in of_host]
        entries, others = (
            [fault_of(line) for line in file.read_bytes().splitlines()] if file.exists() else []
            for file in (journal, of_hosts)
        )
        found = counts([*played, *(one for one, _ in pairs)], [*entries, *others])
        return (
            found + record(played, outages(played, entries)) + hosts.record(TASK, [failover for _, failover in pairs])
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def pipeline(model: Path, folder: Path, journal: Path) -> Iterator[Child]:
    options = {
        "runtime": {"recovery": {"hang_seconds": HANG_SECONDS, "max_restarts": 999, "max_redispatches": 9}},
        "monitoring": {
            "anomaly": {"interval_seconds": 0.5, "max_stage_seconds": 5.0},
            "journal": {"path": str(journal)},
        },
    }
    spec = PipelineSpec(
        TEXT_TO_TEXT, "full_payload", replicas=2, replicated=REPLICATED, scheduling=options, max_num_seqs=SEQS
    )
    around = environment(folder / "site", {})
    path = [Path(word) for word in around.pop("PYTHONPATH").split(":")]
    words = ["--model", str(model), "--folder", str(folder), "--spec", json.dumps(spec.to_json())]
    with Child("benchmarks.failover.serve", words, path=path, environment=around) as child:
        child.next_event()
        yield child


def play(child: Child, kind: str, rng: Random) -> Round:
    """Ask the same requests twice: undisturbed, and with a fault."""
    requests = alike(REQUESTS, rng, thinks=6, says=120)
    undisturbed = child.ask(requests=[one.plain() for one in requests], fault=None)
    again = asked_again(requests)
    replicas = [0, 1] if kind == "all killed" else [rng.randrange(2)]
    fault = {
        "signal": "SIGSTOP" if kind == "stopped" else "SIGKILL",
        "stage_id": REPLICATED,
        "replica_ids": replicas,
    }
    wave = child.ask(requests=[one.plain() for one in again], fault=fault)
    return {"kind": kind, "replicas": replicas, "wave": wave, "undisturbed": undisturbed}


def outages(rounds: Sequence[Round], entries: Sequence[Fault]) -> list[Outage]:
    """Return the outages that the journal tells of, each with the round whose fault it was."""
    found = []
    for number, one in enumerate(rounds):
        since = one["wave"]["at"]
        until = rounds[number + 1]["wave"]["at"] if number + 1 < len(rounds) else float("inf")
        for replica in one["replicas"]:
            own = [
                each
                for each in entries
                if (each.stage, each.replica) == (REPLICATED, replica) and since <= each.at < until
            ]
            died = next((each for each in own if each.kind == "died"), None)
            starts = [each for each in own if each.kind == "restarting"]
            back = next((each for each in own if each.kind == "back"), None)
            if died is None or back is None or not starts:
                continue  # it is counted as not recovered
            found.append(
                Outage(
                    one["kind"],
                    died.at - since,
                    back.at - since,
                    _seconds(back) - _seconds(starts[-1]),
                    _seconds(back) - _seconds(died),
                )
            )
    return found


def _seconds(entry: Fault) -> float:
    """Return the seconds since the outage began; its first entry has none."""
    return entry.seconds or 0.0


def counts(rounds: Sequence[Round], entries: Sequence[Fault]) -> list[dict[str, Any]]:
    """Return counts of requests over all rounds."""
    found = {
        "requests lost": [sum(one["error"] is not None and not one["hangs"] for one in _told(each)) for each in rounds],
        "requests that hang": [sum(one["hangs"] for one in _told(each)) for each in rounds],
        "requests answered twice": [
            sum(any(count > 1 for count in one["ends"].values()) for one in _told(each)) for each in rounds
        ],
        "answers other than undisturbed": [different(each["wave"], each["undisturbed"]) for each in rounds],
        "replicas that did not come back": [
            len(each["replicas"]) if not each["wave"]["back"] else 0 for each in rounds
        ],
    }
    records = [entry(TASK, name, values, unit="per round", bar=Bar(0, "worst")) for name, values in found.items()]
    again = sum(one.requests for one in entries if one.kind == "redispatched")
    return [*records, entry(TASK, "requests that ran again", [again], unit="requests")]


def record(rounds: Sequence[Round], found: Sequence[Outage]) -> list[dict[str, Any]]:
    """Return the times of the outages of replicas by kind of fault."""
    expected = sum(len(one["replicas"]) for one in rounds)
    records = [entry(TASK, "outages that the journal does not tell", [expected - len(found)], unit="outages")]
    for kind in KINDS:
        own = [one for one in found if one.kind == kind]
        if not own:
            continue
        records.append(entry(TASK, f"{kind}: until its death was noticed", [one.noticed for one in own]))
        records.append(entry(TASK, f"{kind}: until it served again", [one.back for one in own]))
        records.append(entry(TASK, f"{kind}: of that, its start", [one.start for one in own]))
        beyond = [(one.after_death if kind == "stopped" else one.back) - one.start for one in own]
        since = "from its death " if kind == "stopped" else ""
        label = f"{kind}: {since}until it served again, beyond its start"
        records.append(entry(TASK, label, beyond, bar=Bar(MOST_SECONDS, "worst")))
    return records


def _told(one: Round) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = one["wave"]["told"]
    return told
