"""Connectors that only the options of the stage scheduler name carry what stages send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.omni_cpu.compare import first_difference
from dev.omni_cpu.spec import TEXT_TO_SOUND, TEXT_TO_TEXT
from tests.engine.harness.processes import ROOT, write_model
from tests.omni.conftest import Ran
from tests.omni.connectors import ARENA, Connector
from tests.omni.harness.processes import Driver
from tests.omni.harness.spec import RunSpec
from tests.omni.test_stages import stock
from tests.support.mooncake import Deployment, why_not
from vllm_omni_sched.monitor.journal.fault import fault_of

pytestmark = pytest.mark.slow

UNNAMED = Connector("")  # in the deploy YAML
SCHEDULING = {"runtime": {"connectors": {"ours": {"name": "ArenaConnector", "extra": ARENA}}}}


def test_the_arena_named_in_our_options_alone_carries_what_stages_send(ran: Ran):
    how = {"scheduling": SCHEDULING, "scenarios": ("one_by_one", "connected")}
    found = ran(TEXT_TO_SOUND, "full_payload", UNNAMED, **how).results["scenarios"]
    assert found["connected"]["connectors"] == ["ArenaConnector"] * 3
    assert first_difference(stock(ran, "one_by_one"), found["one_by_one"]) is None


ARTICLE = Path(__file__).parents[1] / "support" / "article.yaml"


@pytest.fixture(scope="module")
def at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, str]]:
    """Runs pipelines where a Mooncake master is, whose address comes with it."""
    if reason := why_not():
        pytest.skip(reason)
    model = write_model("llama", ROOT / ".models" / "llama")
    with Deployment() as deployment, deployment.inside(), Driver(model, tmp_path_factory.mktemp("article")) as driver:
        yield driver, deployment.master.address


def article(master: str) -> dict[str, Any]:
    """Return the article's options with the addresses of the test, and with less memory."""
    options: dict[str, Any] = yaml.safe_load(ARTICLE.read_text())
    options["runtime"]["connectors"]["connector_distributed"]["extra"] |= {
        "host": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "master": master,
        "segment": "16MB",
    }
    return options | {"image_pool_size": "64MB", "text_pool_size": "16MB", "audio_pool_size": "16MB"}


@pytest.mark.omni
def test_over_the_article_s_connectors_small_messages_go_inline_and_large_ones_through_the_pool(
    at_home: tuple[Driver, str], tmp_path: Path
):
    driver, master = at_home
    journal = tmp_path / "faults.jsonl"
    options = article(master) | {"monitoring": {"journal": {"path": str(journal)}}}
    how = {"scheduling": options, "scenarios": ("sized",), "max_model_len": 3072}
    outcome = driver.run(RunSpec(TEXT_TO_SOUND, "full_payload", "", {}, **how))
    assert outcome.results["error"] is None
    found = outcome.results["scenarios"]["sized"]
    assert found["connectors"] == ["OmniAutoConnector"] * 3
    messages, inline, nbytes = zip(*(one.values() for one in found["counted"].values()), strict=True)
    assert messages == (2, 2)  # of the thinker and of the talker; all stages are on this host
    assert inline == (2, 1)  # what the talker says stays small
    assert nbytes[0] < 1 << 20 < nbytes[1]
    kept = [fault_of(line) for line in journal.read_bytes().splitlines()]
    assert [one.kind for one in kept if one.kind in ("started", "stopped")] == ["started", "stopped"]
    assert kept[0].cause.endswith("stages thinker, talker, vocoder")


@pytest.mark.omni
@pytest.mark.long
def test_without_a_mooncake_master_the_pipeline_does_not_start_and_says_why(at_home: tuple[Driver, str]):
    driver, _ = at_home
    options = article("127.0.0.1:1")
    options["runtime"]["connectors"]["connector_distributed"]["extra"]["connect_timeout_seconds"] = 0.2
    how = {"scheduling": options, "scenarios": ()}
    outcome = driver.run(RunSpec(TEXT_TO_TEXT, "full_payload", "", {}, **how))
    says = "option 'runtime.connectors.connector_distributed.extra.master': no Mooncake master answers at 127.0.0.1:1"
    assert says in outcome.results["error"]
