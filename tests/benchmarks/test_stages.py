"""What `benchmarks.stages` asks, and what it makes of the answers; no engine runs here."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from benchmarks.stages import (
    OURS,
    STOCK,
    balance,
    balance_simulated,
    cores,
    death,
    merging,
    overhead,
    priority,
    throughput,
)
from benchmarks.stages import __main__ as command
from benchmarks.stages.__main__ import TASKS, parse, table
from benchmarks.stages.load import alike, bursts, classes, images, sized, skewed, spread
from benchmarks.stages.record import Bar, answered, different, entry, latencies, runs
from dev.omni_cpu.spec import PipelineSpec
from vllm_omni_sched.config.stage_yaml import read_stage_options


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


def test_most_of_a_burst_are_repeats_and_the_first_of_each_content_is_none() -> None:
    requests = bursts(merging.REQUESTS, merging.CONTENTS, Random(0))
    marks = merging.repeats(requests)
    assert not marks[0]
    assert marks.count(False) == len({(r.prompt, r.thinks, r.says) for r in requests}) <= merging.CONTENTS
    assert marks.count(True) > len(marks) / 2


def test_images_are_as_many_as_published() -> None:
    rng = Random(0)
    drawn = sorted(images(rng) for _ in range(20_000))
    assert statistics.fmean(drawn) == pytest.approx(1.59, abs=0.1)
    assert (drawn[10_000], drawn[18_000], drawn[-1]) == (1, 3, 49)
    assert 7 <= drawn[19_800] <= 11


def test_costs_follow_images_and_stay_within_what_a_model_can_say() -> None:
    steps = [r.says for r in skewed(5_000, Random(0), tokens_per_step=10.0, most=500)]
    assert min(steps) == 2
    assert max(steps) == 500
    assert 54 < statistics.median(steps) < 80, "that of one image is 54; one request in five has none, or several"


def test_arrivals_are_spread_over_the_time_and_keep_their_order() -> None:
    requests = spread(classes(60, 12, Random(0), scale=0.3, most=400), 5.0, Random(0))
    times = [request.at for request in requests]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(5.0)
    assert [request.sla for request in requests].count("realtime") == 12


# ---- what is made of the answers


def test_a_ratio_is_the_median_of_the_rounds_and_a_worst_is_the_worst() -> None:
    found = entry("t", "m", [1.0, 2.0, 9.0], [2.0, 2.0, 10.0], bar=Bar(0.9))
    assert (found["of_stock"], found["met"]) == (0.9, True)
    assert not entry("t", "m", [1.0, 2.0], [1.0, 2.0], bar=Bar(0.9))["met"]
    assert not entry("t", "m", [0, 0, 1], bar=Bar(0, "worst"))["met"]
    assert "of_stock" not in entry("t", "m", [1.0], [0.0])


def test_latency_counts_from_when_a_request_was_due_and_only_if_it_was_answered() -> None:
    one = {"told": [told(3.0, at=1.0), told(9.0, error="gone"), told(5.0)]}
    assert latencies(one) == [2.0, 5.0]
    assert latencies(one, [False, True, True]) == [5.0]
    assert answered(one) == 2
    assert different(one, {"told": [told(1.0), told(1.0), told(1.0, said=2)]}) == 1


def test_executions_are_those_of_one_stage() -> None:
    assert runs({"runs": {"0/0": 3, "1/0": 4, "1/1": 5}}, 1) == 9


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


def test_the_steps_alone_tell_what_balance_can_gain() -> None:
    assert balance.in_turns([4, 1, 4, 1]) == 8
    assert balance.first_free([4, 1, 4, 1]) == 5
    assert balance.first_free([1, 1, 4]) == 5
    assert balance.longest_first([1, 1, 4]) == 4
    assert balance.balanced([1, 1, 4]) == 4
    assert balance.balanced([1, 1, 1, 1]) == 2
    requests = balance.LOADS["images"](6, Random(0))
    rounds = [(requests, {OURS: wave([3.0] * 6), STOCK: wave([4.0] * 6)})]
    found = by_measure(balance.record("images", "balanced", rounds))
    assert found["images, balanced: makespan"]["of_stock"] == 0.75
    assert found["images, balanced: makespan"]["met"]
    assert found["images, balanced: CPU time of the busiest replica, of the makespan"]["stock"]["median"] == 0.5
    assert "images, longest first: makespan" in by_measure(balance.record("images", "longest", rounds))


@pytest.mark.parametrize("load", balance.LOADS)
def test_simulated_replicas_are_balanced_as_the_steps_tell(load: str) -> None:
    """Round robin is exact; ours learns what a step takes, and then comes close to the best order."""
    before, requests = (balance.drawn(load, balance.REQUESTS, Random(seed)) for seed in (99, 1))
    steps = [request.says for request in requests]
    found = balance_simulated.makespans(before, requests, balance.REPLICAS, balance.SEQS)
    found = {policy: seconds / balance_simulated.STEP_SECONDS for policy, seconds in found.items()}
    in_turns = balance.in_turns(steps)
    assert found[balance_simulated.STOCK] == pytest.approx(in_turns)
    assert found[balance_simulated.LEAST_QUEUE] == pytest.approx(in_turns)  # all come at once: as many in each queue
    assert found["longest"] == pytest.approx(balance.longest_first(steps), rel=0.05)
    assert found["longest"] < in_turns
    assert found["balanced"] == pytest.approx(balance.balanced(steps), rel=0.05)
    assert found["balanced"] < found["arrival"]


def test_simulated_results_are_marked() -> None:
    known = {
        balance_simulated.KNOWN_ARRIVAL: 1.6,
        balance_simulated.KNOWN_BALANCED: 1.4,
        balance_simulated.KNOWN_LONGEST: 1.0,
    }
    one = {"round robin": 2.0, "least queue": 1.6, "arrival": 1.6, "balanced": 1.4, "longest": 1.2, **known}
    records = balance_simulated.record("images", [one, one])
    assert [record["of_stock"] for record in records] == [0.8, 1.0, 1.0, 0.7, 0.875, 1.0, 0.6, 0.75, 1.2]
    assert [record.get("met") for record in records] == [True, None, True] * 2 + [True, None, False]
    assert all(record["simulated"] and record["measure"].startswith("simulated: ") for record in records)


# ---- a core for each replica


def test_cores_are_given_to_replicas_first() -> None:
    assert cores.assignment({3, 1, 2}, 2) == ([1, 2], [3])
    assert cores.assignment({0, 1}, 2) == ([0, 1], [0, 1])
    assert cores.assignment({5}, 2) is None


def test_all_threads_of_a_process_and_its_children_are_pinned() -> None:
    core = min(os.sched_getaffinity(0))
    with subprocess.Popen(["sh", "-c", "sleep 600 & wait"]) as process:
        try:
            children: list[psutil.Process] = []
            while not children:
                children = psutil.Process(process.pid).children()
            cores.pin([process.pid], [core])
            assert [os.sched_getaffinity(pid) for pid in (process.pid, children[0].pid)] == [{core}, {core}]
        finally:
            for each in (*children, process):
                each.kill()


def test_a_death_counts_who_got_no_answer_and_how_long_it_took() -> None:
    dead = {"in_flight": 32, "noticed_seconds": 0.1, "back_seconds": 9.0, "restart_seconds": 8.0}
    calm = wave([1.0] * 32)
    for_ever = dead | {"back_seconds": None, "restart_seconds": None}
    failed = wave([1.0] * 32, death=for_ever) | {"told": [told(1.0)] * 24 + [told(1.0, error="dead")] * 8}
    one = {
        OURS: {
            "undisturbed": calm,
            "killed": wave([1.5] * 32, death=dead),
            "afterwards": wave([1.0] * 32, {"1/0": 16}),
        },
        STOCK: {"undisturbed": calm, "killed": failed, "afterwards": calm},
    }
    found = by_measure(death.record([one]))
    assert found["not answered"]["stock"]["median"] == 8
    assert found["not answered"]["met"]
    assert found["answers other than undisturbed"]["met"]
    assert found["until it was back, beyond starting it"]["ours"]["median"] == 1.0
    assert found["requests that the new replica runs afterwards"]["ours"]["median"] == 16
    never = {**one, OURS: one[OURS] | {"killed": wave([1.5] * 32, death=for_ever)}}
    assert not by_measure(death.record([never]))["until it was back"].get("met", False)


def test_priority_tells_the_classes_apart() -> None:
    requests = classes(10, 2, Random(0), scale=0.3, most=400)
    high = [request.sla == "realtime" for request in requests]
    ours = wave([1.0 if one else 5.0 for one in high])
    found = by_measure(priority.record([(requests, {OURS: ours, STOCK: wave([4.0] * 10)})]))
    assert found["latency of the high class, P99"]["of_stock"] == 0.25
    assert found["latency of the low class, worst"]["of_stock"] == 1.25
    assert found["not answered"]["met"]


def test_overhead_is_a_ratio_of_turns() -> None:
    turns = [{OURS: wave([1.02] * 5), STOCK: wave([1.0] * 5)}] * 3
    found = overhead.record(turns)
    assert found[0]["of_stock"] == 1.02
    assert found[0]["met"]
    assert table("overhead", found).row_count == len(found)


def test_throughput_compares_bursts_of_requests_with_the_options_that_users_get() -> None:
    requests = sized(3, 20, Random(0), stream=True)
    assert [len(one.prompt["prompt_token_ids"]) for one in requests] == [20, 20, 20]
    assert len({str(one.prompt) for one in requests}) == 3
    assert throughput.MODES.keys() == {"full_payload", "async_chunk"}
    asked = {(cell.requests, cell.tokens) for cell in throughput.CELLS}
    assert asked == {(requests, tokens) for requests in (48, 96) for tokens in (20, 200, 1500)}
    assert any(cell.stream for cell in throughput.CELLS)
    assert throughput.OPTIONS == {}
    cell = throughput.Cell(2, 20)
    turns = {cell: [{OURS: wave([1.1] * 2), STOCK: wave([1.0] * 2)}] * 3}
    found = by_measure(throughput.record("chunks", turns))
    assert found["chunks, 2 of 20 tokens: all answered"]["of_stock"] == 1.1
    assert not found["chunks, 2 of 20 tokens: all answered"]["met"]
    assert found["chunks: not answered"]["met"]
    assert found["chunks: answers of another length than stock's"]["met"]
    assert throughput.record("chunks", {cell: [{OURS: wave([1.02]), STOCK: wave([1.0])}]})[0]["met"]


def test_everything_is_on_in_the_overhead_benchmark() -> None:
    config = read_stage_options(overhead.EVERYTHING, "the benchmark")
    off = {path for path, value in switches(config.model_dump()) if value is False}
    assert off == {
        "graph.partition.resize_running",
        "monitoring.forecast.move_replicas",
        "runtime.recovery.dry_run",
    }
    assert config.runtime.recovery.hang_seconds is not None
    assert [each.name for each in config.runtime.connectors.values()] == [PipelineSpec("", "").connector]


def switches(options: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The options that are true or false."""
    for name, value in options.items():
        if isinstance(value, dict):
            yield from switches(value, f"{path}{name}.")
        elif isinstance(value, bool):
            yield f"{path}{name}", value


# ---- how it is started


def test_tasks_are_chosen_by_name() -> None:
    assert parse([]).tasks == list(TASKS) == ["merging", "balance", "death", "priority", "overhead", "throughput"]
    assert parse(["--tasks", "death,merging", "--quick"]).tasks == ["death", "merging"]
    with pytest.raises(SystemExit):
        parse(["--tasks", "deaths"])


def test_each_task_has_a_result_with_its_own_provenance_though_a_later_one_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ended(settings: object) -> list[dict[str, Any]]:
        raise KeyboardInterrupt  # as a time limit does

    def measured(settings: object) -> list[dict[str, Any]]:
        return [entry("overhead", "latency", [1.0, 2.0, 3.0], [2.0, 2.0, 2.0])]

    monkeypatch.setattr(command, "TASKS", {"overhead": measured, "merging": ended})
    with pytest.raises(KeyboardInterrupt):
        command.main(["--tasks", "overhead,merging", "--rounds", "3", "--out", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    assert file.name == "stages-overhead.json"
    written = json.loads(file.read_text())
    assert written["provenance"]["workload"] == {"rounds": 3, "pinned": True}
    (one,) = written["results"]
    assert (one["of_stock"], one["of_stock_low"], one["of_stock_high"]) == (1.0, 0.75, 1.25)
