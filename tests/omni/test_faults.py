"""Whatever dies when: each request is answered as if nothing had been, and each of its stages ends once.

The first block of rounds belongs to `make test`, the others to `make test-long`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dev.omni_cpu.compare import first_difference
from dev.omni_cpu.spec import BRANCHES, MODES, TEXT_TO_SOUND, Mode
from tests.omni.conftest import Ran
from tests.omni.connectors import CUT, REFERENCE
from tests.omni.harness.fault_scenarios import ALL_BLOCKS, BLOCKS, KINDS, ROUNDS
from vllm_omni_sched.monitor.journal.fault import fault_of

pytestmark = pytest.mark.slow

BLOCKS_OF_A_PIPELINE = 4  # 12 deaths: by default, the 5 replicas of a pipeline that branches may have 15 in 5 minutes
OPENED_BY_A_REPLICA = 6  # by the context of its sockets alone; a connection may just be made or closed
OFTEN = range(1)
LONG = [range(first, min(first + BLOCKS_OF_A_PIPELINE, BLOCKS)) for first in range(1, BLOCKS, BLOCKS_OF_A_PIPELINE)]
OPTIONS: dict[str, Any] = {
    "runtime": {"recovery": {"hang_seconds": 2.0, "max_restarts": 99, "max_redispatches": 9}},
    "monitoring": {"anomaly": {"interval_seconds": 0.5, "max_stage_seconds": 5.0}},
}


blocks = pytest.mark.parametrize(
    "which",
    [OFTEN, *(pytest.param(which, marks=pytest.mark.long) for which in LONG)],
    ids=lambda which: f"{which.start}",
)
modes = pytest.mark.parametrize("mode", MODES)


@blocks
@modes
def test_each_request_is_answered_once_though_replicas_die_and_hang(ran: Ran, mode: Mode, which: range) -> None:
    play(ran, TEXT_TO_SOUND, mode, [f"faults_{seed}" for seed in which], scheduling=OPTIONS, replicated=1)


@blocks
@modes
def test_so_it_is_where_stages_branch_with_the_options_that_users_get(ran: Ran, mode: Mode, which: range) -> None:
    play(ran, BRANCHES, mode, [f"deaths_{seed}" for seed in which], scheduling={}, replicated=2)


def play(ran: Ran, pipeline: str, mode: Mode, named: list[str], **how: Any) -> None:
    outcome = ran(pipeline, mode, REFERENCE, replicas=2, scenarios=("undisturbed", *named), **how).results
    found = outcome["scenarios"]
    rounds = [one for block in named for one in found[block]["rounds"]]
    assert len(rounds) == ROUNDS * len(named)
    all_are_answered_once(rounds, found["undisturbed"]["answers"])
    more = Counter(rounds[-1]["open"]) - Counter(rounds[1]["open"])
    assert more.total() < OPENED_BY_A_REPLICA, f"the front end keeps what it opens for a replica: {more}"
    requests = sum(len(one["answers"]) for one in rounds)
    print(f"{pipeline}, {mode}: {len(rounds)} rounds, {requests} requests, each answered once as if undisturbed")
    assert (outcome["children_left"], outcome["shm_left"]) == ([], [])


def all_are_answered_once(rounds: list[dict[str, Any]], undisturbed: dict[str, Any]) -> None:
    """Nobody waits for ever, nothing is lost or said twice, and each stage ends once."""
    for one in rounds:
        assert one["answers"] is not None, f"{one['fault']}: requests hang"
        wanted = {name: undisturbed[name.partition("/")[0]] for name in one["answers"]}
        assert first_difference(wanted, one["answers"]) is None, one["fault"]
        ends = {name: set(answer["ends"].values()) for name, answer in one["answers"].items()}
        assert ends == {name: {1} for name in wanted}, one["fault"]


@pytest.mark.parametrize("blocks", [1, pytest.param(ALL_BLOCKS, marks=pytest.mark.long)])
def test_no_request_is_lost_doubled_or_hangs_whatever_fails(
    ran: Ran, tmp_path_factory: pytest.TempPathFactory, blocks: int
) -> None:
    """4 rounds, or 40: one replica is killed, one is stopped, all of a stage are killed, and links are cut."""
    journal = tmp_path_factory.mktemp("faults") / "faults.jsonl"
    named = [f"every_kind_{seed}" for seed in range(blocks)]
    found = ran(
        TEXT_TO_SOUND,
        "full_payload",
        CUT,
        scheduling={
            "monitoring": {**OPTIONS["monitoring"], "journal": {"path": str(journal)}},
        },
        replicas=2,
        replicated=1,
        scenarios=("undisturbed", *named),
    ).results["scenarios"]
    rounds = [one for block in named for one in found[block]["rounds"]]
    assert Counter(one["kind"] for one in rounds) == dict.fromkeys(KINDS, blocks)
    all_are_answered_once(rounds, found["undisturbed"]["answers"])
    check_journal(journal, rounds)


def check_journal(journal: Path, rounds: list[dict[str, Any]]) -> None:
    """Each replica that was killed or stopped died once, and is back; no request failed."""
    kinds = Counter(fault_of(line).kind for line in journal.read_bytes().splitlines())
    died = 4 * len([one for one in rounds if one["kind"] == "killed"])  # one killed, one stopped, and both of a stage
    assert (kinds["died"], kinds["back"], kinds["failed"]) == (died, died, 0)
