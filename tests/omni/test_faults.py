"""Whatever dies when: each request is answered as if nothing had been, and each of its stages ends once.

The first block of rounds belongs to `make test`, the others to `make test-long`.
"""

from __future__ import annotations

import pytest

from dev.omni_cpu.compare import first_difference
from dev.omni_cpu.spec import MODES, TEXT_TO_SOUND, Mode
from tests.omni.conftest import Ran
from tests.omni.connectors import REFERENCE
from tests.omni.harness.fault_scenarios import BLOCKS, FAULT_SCENARIOS, ROUNDS

pytestmark = pytest.mark.slow

BLOCKS_OF_A_PIPELINE = 8  # that it outlives one after the other
OFTEN = range(1)
LONG = [range(first, min(first + BLOCKS_OF_A_PIPELINE, BLOCKS)) for first in range(1, BLOCKS, BLOCKS_OF_A_PIPELINE)]
OPTIONS = {
    "runtime": {"recovery": {"hang_seconds": 2.0, "max_restarts": 99, "max_redispatches": 9}},
    "monitoring": {"anomaly": {"interval_seconds": 0.5, "max_stage_seconds": 5.0}},
}


@pytest.mark.parametrize(
    "which",
    [OFTEN, *(pytest.param(which, marks=pytest.mark.long) for which in LONG)],
    ids=lambda which: f"{which.start}",
)
@pytest.mark.parametrize("mode", MODES)
def test_each_request_is_answered_once_though_replicas_die_and_hang(ran: Ran, mode: Mode, which: range) -> None:
    blocks = list(FAULT_SCENARIOS)[which.start : which.stop]
    found = ran(
        TEXT_TO_SOUND,
        mode,
        REFERENCE,
        scheduling=OPTIONS,
        replicas=2,
        replicated=1,
        scenarios=("undisturbed", *blocks),
    ).results["scenarios"]
    undisturbed = found["undisturbed"]["answers"]
    rounds = [one for block in blocks for one in found[block]["rounds"]]
    assert len(rounds) == ROUNDS * len(blocks)
    for one in rounds:
        assert one["answers"] is not None, f"{one['fault']}: requests hang"
        wanted = {name: undisturbed[name] for name in one["answers"]}
        assert first_difference(wanted, one["answers"]) is None, one["fault"]
        ends = {name: set(answer["ends"].values()) for name, answer in one["answers"].items()}
        assert ends == {name: {1} for name in wanted}, one["fault"]
