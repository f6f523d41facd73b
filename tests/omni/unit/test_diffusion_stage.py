"""What is different where a stage draws: its configuration, its parameters, and when two requests ask for the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

import zmq
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from tests.support.omni_stages import DIFFUSION, Rig, StageSpec, params
from vllm_omni_sched.omni.stages.reports.processes import pids_of
from vllm_omni_sched.omni.stages.requests import features_of
from vllm_omni_sched.omni.stages.start.capacity import UNBOUNDED, max_num_seqs_of

pytestmark = pytest.mark.omni

TEXT, DRAWING = StageSpec(), StageSpec(kind=DIFFUSION, final_output=True)
"""Else a batch of a stage that draws waits for more requests, and pictures start one by one."""


def drawing(**how: Any) -> OmniDiffusionSamplingParams:
    return OmniDiffusionSamplingParams(num_inference_steps=20, height=64, width=32, **how)


def pool(stage_type: str = "diffusion", max_num_seqs: int | None = None) -> Any:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs)) if max_num_seqs else None
    return SimpleNamespace(stage_id=1, stage_type=stage_type, stage_vllm_config=config)


def runtime(**stage: Any) -> Any:
    return SimpleNamespace(_stage_configs=[SimpleNamespace(), SimpleNamespace(**stage)])


@pytest.mark.parametrize(
    ("found", "stage", "at_once"),
    [
        (pool("llm", 5), {}, 5),
        (pool("llm"), {}, UNBOUNDED),
        (pool(), {"diffusion_config": SimpleNamespace(max_num_seqs=3)}, 3),
        (pool(), {"engine_args": {"max_num_seqs": 4}}, 4),
        (pool(), {"engine_args": SimpleNamespace(max_num_seqs=2)}, 2),
        (pool(), {}, 1),
    ],
)
def test_how_many_run_at_once_is_what_the_stage_was_given(found: Any, stage: dict[str, Any], at_once: int) -> None:
    assert max_num_seqs_of(found, runtime(**stage)) == at_once


def test_pixels_are_those_of_all_pictures_and_frames() -> None:
    features = features_of("a house", drawing(num_outputs_per_prompt=2, num_frames=5))
    assert (features.pixels, features.steps) == (64 * 32 * 2 * 5, 20)


def test_plain_parameters_say_in_their_extra_args_what_is_drawn() -> None:
    plain = params(extra_args={"height": 64, "width": 32, "num_inference_steps": 20, "num_frames": None})
    features = features_of("a house", plain)
    assert (features.pixels, features.steps) == (64 * 32, 20)


def test_the_process_of_a_diffusion_replica_is_found() -> None:
    client = SimpleNamespace(_proc_manager=SimpleNamespace(proc=SimpleNamespace(pid=17)))
    assert pids_of(client) == [17]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("first", "second", "runs"),
    [
        (drawing(seed=1), drawing(seed=1), 1),
        (drawing(seed=1), drawing(seed=2), 2),
        (drawing(), drawing(), 2),
        (params(temperature=0.0), params(temperature=0.0), 2),
        (params(temperature=0.0, seed=1), params(temperature=0.0, seed=1), 1),
        (params(temperature=0.0, extra_args={"seed": 1}), params(temperature=0.0, extra_args={"seed": 1}), 1),
    ],
)
async def test_the_same_is_drawn_once_where_it_has_a_seed(first: Any, second: Any, runs: int) -> None:
    async with Rig(TEXT, DRAWING) as rig:
        await rig.ask("a", each=[params(), first])
        await rig.ask("b", each=[params(), second])
        assert len(rig.at(0)) == 1
        await rig.finish(0, *rig.at(0))
        assert len(rig.at(1)) == runs
        await rig.finish(1, *rig.at(1))
        assert len(rig.ends("a")) == len(rig.ends("b")) == 1
        assert not rig.left_over()


@pytest.mark.asyncio
async def test_caches_that_a_stage_sends_are_of_one_request_and_gone_with_the_replica_that_got_them() -> None:
    async with Rig(TEXT, StageSpec(kind=DIFFUSION, final_output=True, replicas=2)) as rig:
        rig.omni.stage_pools[0].stage_vllm_config.model_config.omni_kv_config = {"need_send_cache": True}
        for name in ("a", "b"):
            await rig.ask(name, each=[params(), drawing(seed=1)])
        assert len(rig.at(0)) == 2
        await rig.finish(0, *rig.at(0))
        assert len(rig.at(1)) == 2
        lost = next(name for name in rig.at(1) if rig.replica_id(1, name) == 0)
        await rig.kill(1, 0)
        assert set(rig.at(0)) == {lost}
        await rig.finish(0, lost)
        for _ in range(2):
            await rig.finish(1, *rig.at(1))
        assert len(rig.ends("a")) == len(rig.ends("b")) == 1
        assert not rig.left_over()


@pytest.mark.asyncio
async def test_nothing_waits_for_ever_to_send_to_a_replica_that_is_dead() -> None:
    """A PUSH socket whose other side is gone takes nothing, and the client's `shutdown` sends."""
    async with Rig(TEXT, StageSpec(kind=DIFFUSION, final_output=True, replicas=2)) as rig:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            replica, limits = rig.replica(1, 0), []
            replica._request_socket, replica.shutdown = socket, lambda: limits.append(socket.sndtimeo)
            rig.omni.stage_pools[1].bound_sends()
            assert 0 < socket.sndtimeo <= 5000
            await rig.kill(1, 0)
            assert limits == [0]


@pytest.mark.asyncio
async def test_a_replica_that_takes_no_requests_is_dead() -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise zmq.Again

    async with Rig(TEXT, StageSpec(kind=DIFFUSION, final_output=True, replicas=2)) as rig:
        for replica_id in range(2):
            rig.replica(1, replica_id).add_request_async = full
        await rig.ask("a", each=[params(), drawing(seed=1)])
        await rig.finish(0, "a")
        for _ in range(3):
            await rig.tick(1.0)
        assert set(rig.at(1)) == {"a"}  # in a replica that was started again
        await rig.finish(1, "a")
        assert len(rig.ends("a")) == 1
        assert not rig.left_over()
