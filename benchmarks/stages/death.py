"""SIGKILL of one of two replicas under 32 requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.stages import OURS, STOCK, VARIANTS
from benchmarks.stages.load import alike
from benchmarks.stages.pair import Wave
from benchmarks.stages.probe import PATIENCE_SECONDS
from benchmarks.stages.record import Bar, answered, different, entry
from benchmarks.stages.settings import Settings

TASK = "death"
REQUESTS, SEQS = 32, 8
STAGE, REPLICA = 1, 0
AFTER = 12  # requests have come to the stage
MOST_ROUNDS = 5  # each one starts both pipelines anew

Round = dict[str, dict[str, Wave]]  # by variant: undisturbed, killed, afterwards


def run(settings: Settings) -> list[dict[str, Any]]:
    rng = settings.rng(TASK)
    rounds: list[Round] = []
    for _ in range(min(settings.rounds, MOST_ROUNDS)):
        requests = alike(REQUESTS, rng, thinks=6, says=200)
        found: Round = {}
        with settings.pair(SEQS) as pair:
            for name in rng.sample(VARIANTS, len(VARIANTS)):
                # both replicas are busy by then, and no request is done
                kill = {"stage_id": STAGE, "replica_id": REPLICA, "after": AFTER, "until_back": name == OURS}
                found[name] = {
                    "undisturbed": pair.ask(name, requests),
                    "killed": pair.ask(name, requests, kill=kill),
                    "afterwards": pair.ask(name, requests),
                }
        rounds.append(found)
    return record(rounds)


def record(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    found = []
    in_flight = {name: [one[name]["killed"]["death"]["in_flight"] for one in rounds] for name in VARIANTS}
    found.append(entry(TASK, "in flight when it was killed", in_flight[OURS], in_flight[STOCK], unit="requests"))
    lost = {name: [REQUESTS - answered(one[name]["killed"]) for one in rounds] for name in VARIANTS}
    found.append(entry(TASK, "not answered", lost[OURS], lost[STOCK], unit="requests", bar=Bar(0, "worst")))
    others = {name: [different(one[name]["killed"], one[name]["undisturbed"]) for one in rounds] for name in VARIANTS}
    label = "answers other than undisturbed"
    found.append(entry(TASK, label, others[OURS], others[STOCK], unit="answers", bar=Bar(0, "worst")))
    noticed = {name: [_seconds(one[name], "noticed_seconds") for one in rounds] for name in VARIANTS}
    found.append(entry(TASK, "until it was noticed", noticed[OURS], noticed[STOCK], bar=Bar(2, "worst")))
    back, restart = ([_seconds(one[OURS], f"{name}_seconds") for one in rounds] for name in ("back", "restart"))
    found.append(entry(TASK, "until it was back", back))
    found.append(entry(TASK, "of them, starting it", restart))
    beyond = [one - other for one, other in zip(back, restart, strict=True)]
    found.append(entry(TASK, "until it was back, beyond starting it", beyond, bar=Bar(2, "worst")))
    for wave in ("killed", "afterwards"):
        seconds = {
            name: [one[name][wave]["seconds"] / one[name]["undisturbed"]["seconds"] for one in rounds]
            for name in VARIANTS
        }
        found.append(entry(TASK, f"makespan {wave}, of undisturbed", seconds[OURS], seconds[STOCK], unit="times"))
    there = [one[OURS]["afterwards"]["runs"].get(f"{STAGE}/{REPLICA}", 0) for one in rounds]
    found.append(entry(TASK, "requests that the new replica runs afterwards", there, unit="requests"))
    missing = {name: [REQUESTS - answered(one[name]["afterwards"]) for one in rounds] for name in VARIANTS}
    found.append(entry(TASK, "not answered afterwards", missing[OURS], missing[STOCK], unit="requests"))
    return found


def _seconds(waves: dict[str, Wave], name: str) -> float:
    """Return the seconds of a measure; what was waited for in vain took at least `PATIENCE_SECONDS`."""
    value = waves["killed"]["death"][name]
    return PATIENCE_SECONDS if value is None else float(value)
