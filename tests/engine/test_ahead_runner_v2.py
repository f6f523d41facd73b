"""Encode-ahead with model runner V2 and a stream lane; the harness says what is vLLM's own here."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import RequestStatus

from tests.engine.harness import ahead_v2
from tests.engine.harness.ahead_v2 import CPU, HUGE, POISON, Engine, Model
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.compat import modules
from vllm_omni_sched.config.errors import ConfigError, NoLaneError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.ahead import encode as ahead_encode
from vllm_omni_sched.engine.start import attach_encode_ahead
from vllm_omni_sched.lanes import StreamLane

LONG = 20.0


def lane_of(engine: Engine) -> StreamLane:
    lane = engine.worker._lane
    assert isinstance(lane, StreamLane)
    return lane


def test_beside_somebody_who_decodes_items_are_encoded_on_the_lane_s_stream():
    with Engine() as engine:
        engine.add("text", 4, max_tokens=10_000)
        engine.step()
        engine.add("r", 20, [(4, 7)])
        engine.step()
        assert lane_of(engine).drain(LONG)
        assert all("text" in output.req_ids for output in engine.step_until_left("r"))
        assert engine.in_step == []
        # The three layers, and the end; then the model's stream follows that end.
        assert len(engine.device.asked("lane", "mark")) == 4
        ((_, (point, _)),) = engine.device.asked("owner", "follow")
        assert point == engine.device.asked("lane", "mark")[-1][1]


def test_alone_an_item_is_encoded_in_the_step():
    with Engine() as engine:
        engine.add("alone", 20, [(4, 7)])
        engine.step()
        assert engine.in_step == ["item-7"]
        assert engine.device.log == []


def test_encodes_in_the_step_go_through_the_same_layers_and_pause_for_nobody():
    with Engine() as engine:
        engine.device.held_up = True
        engine.add("text", 4, max_tokens=10_000)
        engine.step()
        engine.add("r", 20, [(4, 7)])
        engine.step()
        until = monotonic_seconds() + LONG
        while not engine.device.asked("lane", "synchronize"):  # it waits between two layers
            assert monotonic_seconds() < until
        asked = len(engine.device.asked("owner", "mark"))
        engine.runner.model.embed_multimodal(torch.tensor([[8]]), torch.tensor([[8]]))
        assert len(engine.device.asked("owner", "mark")) == asked


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_without_tokens_waits_for_an_encode_and_reports_it(async_scheduling):
    with Engine(async_scheduling=async_scheduling) as engine:
        engine.device.held_up = True
        engine.add("text", 4, max_tokens=10_000)
        for _ in range(1 + async_scheduling):  # until the scheduler knows that there is a lane
            engine.step()
        engine.add("r", 20, [(4, 7)])
        engine.step()
        engine.scheduler.finish_requests("text", RequestStatus.FINISHED_ABORTED)
        with mock.patch.object(engine.worker, "wait", wraps=engine.worker.wait) as wait:
            output = engine.step()
            assert (engine.tokens[-1], wait.call_count) == (0, 1)
            assert output.ec_connector_output is None
            engine.device.go_on()
            assert lane_of(engine).drain(LONG)
            output = engine.step()
            assert (engine.tokens[-1], wait.call_count) == (0, 2)
        assert [one.mm_hash for one in output.ec_connector_output.ec_connector_worker_meta.ready.values()] == ["item-7"]
        assert EMPTY_MODEL_RUNNER_OUTPUT.ec_connector_output is None
        engine.step_until_left("r")
        assert engine.in_step == []


@pytest.mark.parametrize("bad", [POISON, HUGE])
def test_an_item_that_fails_takes_its_own_requests_with_it_and_the_lane_lives_on(bad):
    with Engine() as engine:
        engine.add("text", 4, max_tokens=10_000)
        engine.step()
        engine.add("bad", 20, [(4, bad)])
        engine.add("good", 20, [(4, 7)])
        engine.step_until_left("bad", "good")
        assert engine.left == {"bad": ["error"], "good": ["length"]}
        assert bool(engine.device.asked("lane", "empty_cache")) == (bad == HUGE)


def test_multiprocessors_are_for_cuda():
    encode = ahead_encode.Encode(Model(), CPU)
    with pytest.raises(ConfigError, match=r"'expert\.encode_lane_sms' needs a CUDA device, not 'cpu'"):
        ahead_encode.build_lane(encode, Model(), CPU, OmniSchedConfig(encode_lane_sms=16), 4)


@pytest.mark.parametrize("num_sms", [None, 16])
def test_an_encoder_whose_attention_has_one_buffer_for_all_streams_is_refused(num_sms):
    model, config = Model(), OmniSchedConfig(encode_lane_sms=num_sms)
    model.layers[1].attn_backend = AttentionBackendEnum.FLASHINFER
    cuda = torch.device("cuda")
    with pytest.raises(ConfigError, match="FlashInfer"):
        ahead_encode.build_lane(ahead_encode.Encode(model, cuda), model, cuda, config, 4)


@pytest.mark.parametrize("num_sms", [None, 16])
def test_a_model_that_sets_the_forward_context_of_all_threads_is_refused(monkeypatch, num_sms):
    monkeypatch.setattr(ahead_v2, "set_forward_context", set_forward_context, raising=False)  # as its module would
    model, cuda, config = Model(), torch.device("cuda"), OmniSchedConfig(encode_lane_sms=num_sms)
    with pytest.raises(ConfigError, match="Model sets vLLM's forward context"):
        ahead_encode.build_lane(ahead_encode.Encode(model, cuda), model, cuda, config, 4)


@pytest.mark.parametrize(
    "given", [{"encode_ahead": True}, {"profile": "chat"}, {"profile": "chat", "encode_ahead": True}]
)
def test_what_the_loaded_model_shows_ends_an_engine_that_was_told_and_no_other(monkeypatch, given):
    """The gather of each step compares every embedding with the one that the model would make."""
    monkeypatch.setattr(ahead_v2, "set_forward_context", set_forward_context, raising=False)  # as its module would
    if "encode_ahead" in given:
        with pytest.raises(NoLaneError, match="'encode_ahead' cannot be on here, because Model sets"):
            Engine(options=given).__enter__()
        return
    with Engine(options={**given, "itl_target_ms": 0.01}) as engine:
        engine.run(Random(3), 12, values=range(6))
        assert {len(reasons) for reasons in engine.left.values()} == {1}
        assert len(engine.in_step) >= 6
        assert engine.scheduler.omni.policies.planner.decisions.taken_from_lane == 0


def v2_config(**sections: Any) -> SimpleNamespace:
    """What `attach_encode_ahead` looks at, of an engine with model runner V2 that has nothing against it."""
    return SimpleNamespace(
        **{
            "use_v2_model_runner": True,
            "model_config": SimpleNamespace(is_multimodal_model=True, is_encoder_decoder=False, multimodal_config=None),
            "parallel_config": SimpleNamespace(
                world_size=1, tensor_parallel_size=1, data_parallel_size=1, distributed_executor_backend="uni"
            ),
            "device_config": SimpleNamespace(device_type="cuda"),
            "compilation_config": SimpleNamespace(compile_mm_encoder=False),
            "ec_transfer_config": None,
            "speculative_config": None,
            "lora_config": None,
            "weight_transfer_config": None,
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("reason", "section"),
    [
        ("the device 'xpu' is not supported", {"device_config": SimpleNamespace(device_type="xpu")}),
        ("compile_mm_encoder", {"compilation_config": SimpleNamespace(compile_mm_encoder=True)}),
    ],
)
def test_what_cannot_have_a_lane_is_refused(reason, section):
    with pytest.raises(ConfigError, match=reason):
        attach_encode_ahead(v2_config(**section))


def test_a_v2_that_runs_no_connectors_is_refused():
    with (
        mock.patch.object(modules, "EC_CONNECTOR_V2", "vllm.v1.worker.gpu.no_such_module"),
        pytest.raises(ConfigError, match=r"model runner V2 of vLLM .* does not run connectors in every step"),
    ):
        attach_encode_ahead(v2_config())


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_every_request_leaves_once_with_the_right_embeddings(seed, async_scheduling):
    rng = Random(seed)
    with Engine(
        async_scheduling=async_scheduling,
        options={"itl_target_ms": 0.01},  # however quick this machine encodes, it would be noticed
        encoder_cache_size=96,  # room for all ten contents
        num_blocks=rng.choice([40, 400]),
        enable_prefix_caching=rng.random() < 0.5,
    ) as engine:
        engine.run(rng, 15, values=range(10))
        assert {request_id: len(reasons) for request_id, reasons in engine.left.items()} == {
            f"r{i}": 1 for i in range(15)
        }
        assert len(engine.scheduler.omni.policies.planner.decisions.ledger) == 0
        assert engine.worker._made == {}
        assert engine.device.asked("lane", "mark")


def test_what_the_encoder_cache_lets_go_comes_back_from_host_memory():
    """The gather of each step compares every embedding with the one that the model would make."""
    with Engine(encoder_cache_size=24, options={"encoder_cache_host_bytes": 1 << 20}) as engine:
        engine.run(Random(5), 25, values=range(6))
        assert all(len(reasons) == 1 for reasons in engine.left.values())
        assert engine.scheduler.omni.policies.planner.host.restored > 0
        assert engine.worker.host.num_bytes <= 1 << 20
        held = set(engine.runner.encoder_cache.encoder_outputs)
        assert held == set(engine.scheduler.encoder_cache_manager.cached)
