"""Installed and not named on the command line, the plugin leaves vLLM as it found it."""

from __future__ import annotations

import pytest

from tests.engine.conftest import Results
from tests.engine.harness.engines import SHORT
from tests.engine.harness.processes import NO_PLUGIN, run_program

HOOKS = [
    "vllm.engine.arg_utils.EngineArgs.create_engine_config",
    "vllm.v1.worker.worker_base.WorkerWrapperBase.init_device",
]


@pytest.fixture(scope="module")
def registration(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return what `register()` changed in a process with vLLM and nothing of ours (see `harness/absence.py`)."""
    log = tmp_path_factory.mktemp("absence") / "log"
    found: dict = run_program("tests.engine.harness.absence", environment=NO_PLUGIN, log=log)
    return found


def test_registering_wraps_two_methods_and_nothing_else(registration):
    assert registration["changed"] == registration["wrapping_the_original"] == HOOKS


def test_one_video_loader_has_a_name_and_vllm_s_decoder_is_its_own(registration):
    assert registration["loaders_added"] == ["omni_flashcodec"]
    assert "vllm.multimodal.video_decoders.opencv" in registration["modules"]  # so it was among those compared


def test_registering_again_changes_nothing(registration):
    assert registration["changed_by_the_second"] == []


def test_the_symbols_that_we_override_were_among_those_compared(registration):
    assert registration["symbols"] > 10_000
    assert {
        "vllm.v1.core.sched.scheduler.Scheduler",
        "vllm.v1.core.sched.output",
        "vllm.v1.core.encoder_cache_manager.EncoderCacheManager",
        "vllm.v1.core.block_pool",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "vllm.v1.worker.gpu.mm.encoder_runner.EncoderRunner",
    } <= set(registration["modules"])


def test_an_engine_without_the_flag_holds_nothing_of_ours(in_process: Results):
    """Its scheduler, cache manager and runner are stock's, and after serving vLLM still has but the two hooks."""
    ours, stock = in_process.ours["no-flag"], in_process.stock["sync"]
    assert ours["facts"] == stock["facts"]
    assert ours["traces_of_ours"] == HOOKS
    assert stock["traces_of_ours"] == []


def test_an_engine_with_the_flag_does_leave_traces(in_process: Results):
    """Check that the test above can fail."""
    assert len(in_process.ours["sync"]["traces_of_ours"]) > len(HOOKS)


@pytest.mark.parametrize("scenario", SHORT)
def test_requests_keep_their_plain_lists_and_sessions_their_messages(in_process: Results, scenario):
    ran = in_process.of_ours("no-flag", scenario)
    stock = in_process.of_stock("sync", scenario)
    assert ran["feature_lists"] == stock["feature_lists"]
    assert ran["messages"] == stock["messages"]
    assert ran["messages"].keys() == {"NewRequestData"}
    assert set(ran["feature_lists"]) <= {"list"}
