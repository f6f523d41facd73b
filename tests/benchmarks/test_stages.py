"""What `benchmarks.stages` asks, and what it makes of the answers; no engine runs here."""

from __future__ import annotations

from random import Random
from typing import Any

from benchmarks.stages import (
    OURS,
    STOCK,
    merging,
)
from benchmarks.stages.load import alike, bursts
from benchmarks.stages.record import answered, different, latencies


def told(end: float, at: float = 0.0, said: int = 1, error: str | None = None) -> dict[str, Any]:
    answer = None if error else {"text": {"0": [said]}}
    return {"at": at, "first": end, "end": end, "answer": answer, "error": error}


def wave(ends: list[float], where: dict[str, int] | None = None, **more: Any) -> dict[str, Any]:
    found = {"told": [told(end) for end in ends], "seconds": max(ends), "runs": where or {}, "death": None}
    return found | {"cpu_seconds": {"front end": 1.0, "1/0": 2.0, "1/1": 1.0}} | more


def by_measure(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {record["measure"]: record for record in records}


# ---- what is asked


def test_the_same_seed_asks_the_same_and_names_and_prompts_are_never_used_twice() -> None:
    assert bursts(20, 4, Random(1)) == bursts(20, 4, Random(1))
    rng = Random(1)
    asked = [request for _ in range(3) for request in (*alike(9, rng, thinks=2, says=3), *bursts(9, 3, rng))]
    assert len({request.name for request in asked}) == len(asked)
    assert len({request.prompt for request in asked}) == 27 + len({r.prompt for r in asked if "Content" in r.prompt})


# ---- what is made of the answers


def test_latency_counts_from_when_a_request_was_due_and_only_if_it_was_answered() -> None:
    one = {"told": [told(3.0, at=1.0), told(9.0, error="gone"), told(5.0)]}
    assert latencies(one) == [2.0, 5.0]
    assert latencies(one, [False, True, True]) == [5.0]
    assert answered(one) == 2
    assert different(one, {"told": [told(1.0), told(1.0), told(1.0, said=2)]}) == 1


def test_merging_counts_executions_and_looks_at_the_repeats() -> None:
    requests = bursts(8, 2, Random(0))
    repeated = merging.repeats(requests)
    distinct = repeated.count(False)
    ours = wave([1.0] * 8, {"0/0": distinct, "1/0": 1, "1/1": distinct - 1})
    stock = wave([4.0 if again else 2.0 for again in repeated], {"0/0": 8, "1/0": 4, "1/1": 4})
    found = by_measure(merging.record([(requests, {OURS: ours, STOCK: stock})]))
    assert found["of them beyond distinct inputs, stage 0"]["met"]
    assert found["latency of duplicates, median"]["of_stock"] == 0.25
    assert found["latency of the others, median"]["of_stock"] == 0.5
    once_more = wave([1.0] * 8, {"0/0": distinct + 1})
    worse = by_measure(merging.record([(requests, {OURS: once_more, STOCK: stock})]))
    assert not worse["of them beyond distinct inputs, stage 0"]["met"]


# ---- a core for each replica


# ---- how it is started
