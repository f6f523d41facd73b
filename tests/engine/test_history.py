"""The history of requests, as a real scheduler writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.steered import Clock, first_steps, request, scheduler_with
from vllm_omni_sched.core.engine.history_lines import entry_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def transitions(path: Path, request_id: str) -> list[tuple[str, str]]:
    entries = [entry_of(line) for line in path.read_bytes().splitlines()]
    return [(one.transition, one.detail) for one in entries if one.request_id == request_id]


def test_each_request_is_told_from_its_entry_to_its_end(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    options = {"waiting_order": "sla", "expert": {"history_path": str(path)}}
    scheduler = scheduler_with(options, max_num_seqs=1)
    scheduler.add_request(request("batch", omni_class="batch"))
    clock.now += 0.01
    scheduler.add_request(request("interactive"))
    first_steps(scheduler, 40)
    scheduler.omni.close()
    for name in ("interactive", "batch"):
        told = transitions(path, name)
        assert [transition for transition, _ in told] == ["entered", "taken", "started", "first_token", "left"]
        assert (told[0], told[-1]) == (("entered", name), ("left", "length_capped"))
    assert scheduler.omni.policies._silent == set()


def test_a_history_alone_changes_no_decision(clock: Clock, tmp_path: Path) -> None:
    def steps(options: dict[str, object]) -> list[list[str]]:
        scheduler = scheduler_with(options, max_num_seqs=2)
        for number in range(5):
            scheduler.add_request(request(f"r{number}"))
        found = first_steps(scheduler, 40)
        scheduler.omni.close()
        return found

    path = tmp_path / "history.jsonl"
    assert steps({"expert": {"history_path": str(path)}}) == steps({})
    assert [transition for transition, _ in transitions(path, "r4")] == ["entered", "started", "first_token", "left"]


def test_without_the_option_there_is_none(clock: Clock) -> None:
    scheduler = scheduler_with({"waiting_order": "sla"})
    assert scheduler.omni.policies.history is None
    assert scheduler.omni.policies.core.history is None
