"""Two engines of a host that share their encodings: each picture is encoded once, with the tokens of stock."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dev.child_process import ChildProcess
from tests.engine.combinations.cases import AHEAD, BASE, Case
from tests.engine.combinations.sides import models_of, with_models
from tests.engine.harness.compare import first_difference
from tests.engine.harness.processes import ENVIRONMENT, IN_PROCESS, NO_PLUGIN, OUR_PLUGIN, wait_for
from tests.engine.shared_engines import plan_of
from tests.support.warm import WarmPopen
from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.connectors.encodings import ClaimOutcome, EncodingStore
from vllm_omni_sched.engine.shared.attach import SHARED_CONNECTOR, attach_shared_encodings
from vllm_omni_sched.testing.config import make_vllm_config

pytestmark = pytest.mark.skipif(
    not compat.ec_connectors_hold_back(), reason="connectors of this vLLM cannot hold requests back"
)
CONTENTS = {number for ask in BASE for number in ask.images}
SHARE = {"encoder_share_bytes": 1 << 26}
CASES = (Case("shared", BASE, omni_sched=SHARE), Case("shared, encode-ahead", BASE, omni_sched={**SHARE, **AHEAD}))


class Served:
    """A process that serves all cases, one after the other."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "plan.json").write_text(json.dumps(plan))
        self.process = ChildProcess(
            [
                sys.executable,
                "-m",
                "tests.engine.shared_engines",
                str(folder / "plan.json"),
                str(folder / "result.json"),
            ],
            log=folder / "log",
            env={**ENVIRONMENT, **IN_PROCESS, **(OUR_PLUGIN if plan["ours"] else NO_PLUGIN)},
            start=WarmPopen,
        )

    def result(self) -> dict[str, Any]:
        if self.process.exit_code != 0:
            pytest.fail("\n".join(self.process.last_lines(40)))
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    """Return the results of stock, and of two engines of ours, and the folder of their store."""
    folder = tmp_path_factory.mktemp("shared")
    store = folder / "store"
    store.mkdir()
    models = models_of(CASES)
    cases = [with_models(case, models) for case in CASES]
    for case in cases:
        case["omni_sched"]["expert"] = {"encoder_share_dir": str(store), "encoder_share_wait_seconds": 60.0}
    with ExitStack() as stack:
        stock = Served(folder / "stock", plan_of(folder / "alone", cases[:1], ours=False, engines=1))
        stack.enter_context(stock.process)
        plan = plan_of(folder / "meet", cases, ours=True, engines=2)
        ours = [Served(folder / name, plan) for name in ("one", "other")]
        for one in ours:
            stack.enter_context(one.process)
        wait_for([stock, *ours])  # type: ignore[list-item]  # they have processes, which is all that is asked
        return stock.result(), [one.result() for one in ours], store


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_picture_is_encoded_once_with_the_tokens_of_stock(served: Any, case: Case) -> None:
    stock, ours, _ = served
    expected = stock[CASES[0].name]["answers"]
    counts = [one[case.name]["counts"] for one in ours]
    for one in ours:
        assert first_difference(expected, one[case.name]["answers"]) is None
        assert one[case.name]["left"] == []
        assert one[case.name]["again"]["made"] == 0  # all of a second round is in the store
        assert one[case.name]["again"]["loaded"] > 0
    assert sum(count["made"] for count in counts) == len(CONTENTS)
    assert sum(count["gave_up"] for count in counts) == 0


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.newest
def test_nothing_is_left_when_the_last_engine_has_gone(served: Any) -> None:
    assert list(served[2].iterdir()) == []


def test_the_connector_takes_the_place_of_none_and_refuses_another(tmp_path: Path) -> None:
    config = make_vllm_config()
    config.additional_config = {"omni_sched": {**SHARE, "expert": {"encoder_share_dir": str(tmp_path)}}}
    attach_shared_encodings(config)
    attach_shared_encodings(config)
    assert config.ec_transfer_config.ec_connector_module_path == SHARED_CONNECTOR
    config.ec_transfer_config = SimpleNamespace(
        ec_connector="Theirs", ec_connector_module_path="theirs", ec_role="ec_both", ec_connector_extra_config={}
    )
    with pytest.raises(ConfigError, match=r"'encoder_share_bytes' cannot be used here, because .* names Theirs"):
        attach_shared_encodings(config)


def test_engines_meet_if_their_encoders_make_the_same_numbers(tmp_path: Path) -> None:
    from vllm_omni_sched.engine.shared.connector import _files_of, space_of

    one, other = make_vllm_config(), make_vllm_config()
    for config in (one, other):
        config.model_config.revision, config.model_config.quantization = None, None
        config.model_config.hf_config = SimpleNamespace(to_json_string=lambda: "{}")
        config.model_config.model, config.model_config.dtype = str(tmp_path), "float32"
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    before = space_of(one, *_files_of(tmp_path))
    assert before == space_of(other, *_files_of(tmp_path))
    other.model_config.dtype = "bfloat16"
    assert before != space_of(other, *_files_of(tmp_path))
    weights.write_bytes(b"2")
    os.utime(weights, ns=(1, 1))
    assert before != space_of(one, *_files_of(tmp_path))  # replaced in place


def store_in(folder: Path) -> Callable[[str], EncodingStore]:
    return lambda space: EncodingStore(str(folder), space, max_bytes=10_000, ttl_seconds=60.0)


def test_a_worker_that_cannot_read_what_is_pinned_stops_the_engine(tmp_path: Path) -> None:
    import torch

    from vllm_omni_sched.config.errors import EncodingLostError
    from vllm_omni_sched.engine.shared.messages import SharedOrders
    from vllm_omni_sched.engine.shared.worker import SharedWorker

    scheduler = store_in(tmp_path)("space")
    worker = SharedWorker(store_in(tmp_path), "space", str, writes=True)
    made = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)[:, ::2]
    scheduler.claim(["a"])
    cache: dict[str, Any] = {}
    worker.carry_out(SharedOrders(offer={"name": "a"}, member=scheduler.token, step=2), cache, "cpu")
    worker.offer("name", made)
    while not scheduler.pin("a"):
        pass
    worker.carry_out(SharedOrders({"other": "a"}, member=scheduler.token, step=3), cache, "cpu")
    assert torch.equal(cache["other"], made)
    reports = []
    while not any(report.offered for report in reports):  # the thread notes an outcome after it has put the encoding
        reports += filter(None, [worker.report()])
    assert max(report.step for report in reports) == 3
    assert [one for report in reports for one in report.offered] == [("a", "stored")]
    assert worker.report() is None
    with pytest.raises(EncodingLostError, match="was the directory emptied by hand"):
        worker.carry_out(SharedOrders({"b": "b"}, member=scheduler.token, step=4), cache, "cpu")
    worker.close()
    scheduler.close()


def test_an_encoding_that_its_device_does_not_give_up_ends_its_claim_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that writes goes on, so that closing does not wait for it for ever."""
    import torch

    from vllm_omni_sched.engine.shared import worker as module
    from vllm_omni_sched.engine.shared.messages import SharedOrders

    def broken(tensors: dict[str, torch.Tensor]) -> bytes:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    store, scheduler = store_in(tmp_path)("space"), store_in(tmp_path)("space")
    worker = module.SharedWorker(store_in(tmp_path), "space", str, writes=True)
    worker.carry_out(SharedOrders(offer={"a": "a", "b": "b"}), {}, "cpu")
    scheduler.claim(["a", "b"])
    assert store.claim(["a"]) is ClaimOutcome.OTHERS
    with monkeypatch.context() as patch:
        patch.setattr(module, "save", broken)
        worker.offer("a", torch.ones(3, 4))
        offered: list[tuple[str, str]] = []
        while not offered:
            assert worker._thread is not None
            assert worker._thread.is_alive()
            offered = getattr(worker.report(), "offered", [])
    assert offered == [("a", "failed")]
    assert "encoding a is not shared with other engines: CUDA error: an illegal memory access" in caplog.text
    worker.offer("b", torch.ones(3, 4))
    while not scheduler.pin("b"):
        pass
    assert not scheduler.pin("a")
    assert store.claim(["a"]) is ClaimOutcome.OURS  # the scheduler's has ended
    worker.close()
    scheduler.close()
    store.close()
