"""Our scheduler in an engine whose encodings another instance makes, handed over by vLLM's own EC connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Results
from tests.engine.harness.compare import first_difference, first_different_step
from tests.engine.harness.engines import AMPLE
from tests.engine.harness.processes import IN_PROCESS, NO_PLUGIN, OUR_PLUGIN, run_side_by_side
from tests.engine.harness.scenarios import SCENARIOS
from tests.engine.harness.spec import OURS, EngineSpec

pytestmark = pytest.mark.once

PICTURES = ("images", "shared_images")
STEERED = {
    "waiting_order": "sla",
    "prefill_control": "adaptive",
    "prefill_min_tokens": 16,
    "batch_control": "pid",
    "control_interval_ms": 20,
    "pieces": True,
    "slo_metrics": True,
}


def engines(llava: Path, encodings: Path, ours: bool) -> list[EngineSpec]:
    """The one that encodes, always stock, and those that find its encodings on disk."""

    def engine(name: str, role: str, **more: Any) -> EngineSpec:
        connector = {
            "ec_connector": "ECExampleConnector",
            "ec_role": role,
            "ec_connector_extra_config": {"shared_storage_path": str(encodings)},
        }
        args = AMPLE | {"ec_transfer_config": connector, "enable_mm_embeds": True}
        return EngineSpec(name, str(llava), PICTURES, args=args, **more)

    found = [engine("encodes", "ec_both")]
    if not ours:
        return [*found, engine("split", "ec_consumer")]
    return [
        *found,
        engine("split", "ec_consumer", scheduler=OURS),
        engine("split-steered", "ec_consumer", scheduler=OURS, omni_sched=STEERED),
        engine("split-ahead", "ec_consumer", scheduler=OURS, omni_sched={"encode_ahead": True}),
    ]


@pytest.fixture(scope="module")
def apart(llava: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("encoders_apart")
    stock, ours = run_side_by_side(
        folder,
        engines(llava, folder / "stock", ours=False),
        engines(llava, folder / "ours", ours=True),
        stock_environment=IN_PROCESS | NO_PLUGIN,
        our_environment=IN_PROCESS | OUR_PLUGIN,
    )
    return Results(stock, ours)


@pytest.mark.parametrize("scenario", PICTURES)
@pytest.mark.parametrize("engine", ["split", "split-steered", "split-ahead"])
def test_same_tokens_and_nothing_is_encoded_here(apart: Results, engine: str, scenario: str) -> None:
    expected = apart.of_stock("split", scenario)
    ran = apart.of_ours(engine, scenario)
    assert first_difference(expected["requests"], ran["requests"]) is None
    assert ran["left"] == {request.id: 1 for request in SCENARIOS[scenario]().requests}
    assert ran["still_there"] == []
    assert not any(" | encode " in step for step in ran["steps"])


@pytest.mark.parametrize("scenario", PICTURES)
def test_same_decisions(apart: Results, scenario: str) -> None:
    expected = apart.of_stock("split", scenario)["steps"]
    assert first_different_step(expected, apart.of_ours("split", scenario)["steps"]) is None


@pytest.mark.parametrize("scenario", PICTURES)
def test_another_instance_made_the_encodings(apart: Results, scenario: str) -> None:
    """Check the harness: an instance that encodes itself answers the same, and does encode."""
    encoded = apart.of_stock("encodes", scenario)
    assert any(" | encode " in step for step in encoded["steps"])
    assert first_difference(encoded["requests"], apart.of_stock("split", scenario)["requests"]) is None
