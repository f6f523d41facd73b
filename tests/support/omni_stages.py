"""Stages without engines: vLLM-Omni's own orchestrator, pools and output processors, over engines that are lists."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm_omni.engine import OmniEngineCoreRequest
from vllm_omni.engine.messages import AbortRequestMessage, ErrorMessage, OutputMessage, StageSubmissionMessage

from tests.support.omni_engines import (
    AR,
    CUMULATIVE,
    DELTA,
    DIFFUSION,
    FINAL,
    FINAL_ONLY,
    GENERATION,
    Edges,
    Replica,
    Runtime,
    StageSpec,
    branches,
    engine_output,
    pool_of,
    replica_of,
)
from tests.support.omni_leftovers import left_over
from vllm_omni_sched.config.stage_yaml import read_stage_options
from vllm_omni_sched.omni.stages import sharing
from vllm_omni_sched.omni.stages.branches.orchestrator import BranchingOrchestrator
from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
from vllm_omni_sched.omni.stages.pipeline_driver import PipelineDriver
from vllm_omni_sched.omni.stages.recovery import recovery_driver
from vllm_omni_sched.omni.stages.start.graph import graph_of

__all__ = [
    "AR",
    "CUMULATIVE",
    "DELTA",
    "DIFFUSION",
    "FINAL",
    "FINAL_ONLY",
    "GENERATION",
    "Edges",
    "Replica",
    "Rig",
    "Runtime",
    "StageSpec",
    "core_request",
    "params",
    "pool_of",
    "replica_of",
    "engine_output",
    "submission",
]


QUIET_TURNS = 20  # in which a payload that lies there would have been taken
SETTLE_SECONDS = 60.0


class _Turns:
    """vLLM-Omni's monitor of its loop; ends the loop when a turn had nothing to do."""

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    def note_loop(self, *, idle: bool) -> None:
        if idle:
            self._event.set()

    def flush(self) -> None:
        pass


def params(**how: Any) -> SamplingParams:
    """Return the sampling parameters of a request that gives the same answer every time."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "output_kind": CUMULATIVE} | how)


def submission(request_id: str, tokens: Sequence[int], each: Sequence[Any], **request: Any) -> StageSubmissionMessage:
    """Return what the engine's main thread sends for a request. ``outputs``: the stages whose outputs it asks for."""
    outputs = request.pop("outputs", None)
    prompt = {"prompt_token_ids": list(tokens)} | request.pop("prompt", {})
    return StageSubmissionMessage(
        type="add_request",
        request_id=request_id,
        prompt=core_request(request_id, tokens, each[0], **request),
        original_prompt=prompt,
        output_prompt_text=None,
        sampling_params_list=list(each),
        final_stage_id=max(outputs or [len(each) - 1]),
        preprocess_ms=0.0,
        request_timestamp=time.time(),
        enqueue_ts=0.0,
        final_output_stage_ids=list(outputs or [len(each) - 1]),
    )


def core_request(request_id: str, tokens: Sequence[int], sampling: Any, **more: Any) -> OmniEngineCoreRequest:
    """Return the request that an engine is sent."""
    given = {
        "mm_features": None,
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    } | more
    request = OmniEngineCoreRequest(
        request_id=request_id, prompt_token_ids=list(tokens), sampling_params=sampling, **given
    )
    request.external_req_id = request_id
    return request


class Rig:
    """Runs our orchestrator by hand over engines that are lists.

    Use it as an asynchronous context. Time stands still but for `tick`.

    Args:
        stages: in order; the last one makes the final output.
        options: as under ``omni_sched`` in the deploy YAML.
    """

    master: Any = None  # vLLM-Omni's `OmniMasterServer`, where stages run on several hosts

    def __init__(self, *stages: StageSpec, async_chunk: bool = False, **options: Any) -> None:
        self.stages, self.edges = stages, Edges()
        self._options, self._async_chunk = options, async_chunk
        self.now = 1000.0
        self.messages: list[Any] = []

    async def __aenter__(self) -> Rig:
        self._held = recovery_driver.HELD_SECONDS, sharing.PAYLOAD_SECONDS, sharing.LONGEST_PAUSE
        recovery_driver.HELD_SECONDS, sharing.PAYLOAD_SECONDS, sharing.LONGEST_PAUSE = 0.005, 0.5, 0.004
        pools = [pool_of(i, self.stages, self.edges) for i in range(len(self.stages))]
        config = read_stage_options(self._options, "the test")
        self.driver = PipelineDriver(config, graph_of(pools), self._async_chunk, Random(0))
        self.driver.publish = lambda: SimpleNamespace(close=lambda: None)  # type: ignore[method-assign,assignment,return-value]
        self.runtime = Runtime(lambda stage_id: replica_of(stage_id, self.stages, self.edges), self.stages)
        self.runtime._omni_master_server = self.master
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self.omni = (BranchingOrchestrator if branches(self.stages) else ScheduledOrchestrator)(
            driver=self.driver,
            runtime=self.runtime,
            clock=lambda: self.now,
            request_async_queue=asyncio.Queue(),
            output_async_queue=self._out,
            rpc_async_queue=asyncio.Queue(),
            stage_pools=pools,
            async_chunk=self._async_chunk,
        )
        self.omni._orch_monitor = _Turns(self.omni._shutdown_event)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.runtime.go.set()
        self.omni._shutdown_event.set()
        tasks = list(self.omni._spawned)
        await self.omni._shutdown_extensions()
        await asyncio.gather(*tasks, return_exceptions=True)
        recovery_driver.HELD_SECONDS, sharing.PAYLOAD_SECONDS, sharing.LONGEST_PAUSE = self._held

    # ---- time

    async def turn(self) -> None:
        """Let vLLM-Omni's own loop turn, until a turn has nothing to do."""
        self.omni._shutdown_event.clear()
        await self.omni._orchestration_loop()
        while not self._out.empty():
            self.messages.append(_as_it_is(self._out.get_nowait()))

    async def settle(self) -> None:
        """Turn until nothing moves any more; a start of a replica that is held back may go on."""
        # Threads take part, so turns alone would bound nothing on a busy machine.
        quiet, until = 0, time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            before = dict(self.edges.lying)
            await self.turn()
            held_back = 0 if self.runtime.go.is_set() else self.runtime.starting
            late = len(set(self.omni.sharing._sendings.values()))  # payloads that no engine has sent yet
            if len(self.omni._spawned) <= held_back:
                return
            quiet = quiet + 1 if len(self.omni._spawned) <= held_back + late and self.edges.lying == before else 0
            if quiet > QUIET_TURNS:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"it does not come to rest: {self.omni._spawned}")

    async def tick(self, seconds: float) -> None:
        """Time passes, and what looks at the stages now and then looks once."""
        self.now += seconds
        self.driver.monitor.check(self.omni.stage_pools, self.now)
        self.driver.check(self.now)
        self.omni.stall_guard.check(self.now)
        await self.omni.release()
        await self.settle()

    # ---- what clients do

    def message(self, request_id: str, tokens: Sequence[int] = (1, 2, 3), **how: Any) -> StageSubmissionMessage:
        """Make a request. ``each``: sampling parameters by stage, default the same for all."""
        until = how.pop("stages", len(self.stages))
        each = how.pop("each", None) or [params(**how.pop("params", {})) for _ in range(until)]
        return submission(request_id, tokens, each, **how)

    async def ask(self, request_id: str, tokens: Sequence[int] = (1, 2, 3), **how: Any) -> None:
        """Send a request, with the arguments of `message`."""
        await self.omni._dispatch_message(self.message(request_id, tokens, **how))

    async def abort(self, *request_ids: str) -> None:
        await self.omni._handle_abort(AbortRequestMessage(request_ids=list(request_ids)))
        await self.settle()

    # ---- what engines do

    def replica(self, stage_id: int, replica_id: int = 0) -> Any:
        return self.omni.stage_pools[stage_id].clients[replica_id]

    def at(self, stage_id: int) -> dict[str, Any]:
        """Return the replica of each request that an engine of the stage has."""
        clients = [client for client in self.omni.stage_pools[stage_id].clients if client is not None]
        return {name: client for client in clients for name in client.requests}

    async def step(self, stage_id: int, *names: str) -> None:
        """Let requests emit one token more."""
        for name in names:
            self.at(stage_id)[name].step(name)
        await self.settle()

    async def finish(self, stage_id: int, *names: str) -> None:
        for name in names:
            self.at(stage_id)[name].finish(name)
        await self.settle()

    async def finish_all(self) -> None:
        """Finish all requests of the engines, stage by stage."""
        for stage_id in range(len(self.stages)):
            await self.finish(stage_id, *self.at(stage_id))

    def replica_id(self, stage_id: int, name: str) -> int:
        """Return the replica that runs a request."""
        clients = self.omni.stage_pools[stage_id].clients
        return next(i for i, client in enumerate(clients) if client is not None and name in client.requests)

    async def kill(self, stage_id: int, replica_id: int = 0) -> None:
        self.replica(stage_id, replica_id).dead = True
        await self.settle()

    # ---- what came of it

    def told(self, request_id: str) -> list[Any]:
        """Return the outputs and errors of a request, in order."""
        return [
            one
            for one in self.messages
            if isinstance(one, OutputMessage | ErrorMessage) and one.request_id == request_id
        ]

    def ends(self, request_id: str) -> list[Any]:
        """Return the outputs and errors that end a request; there must be one."""
        return [one for one in self.told(request_id) if isinstance(one, ErrorMessage) or one.finished]

    def answer(self, request_id: str) -> list[int]:
        """Return the tokens in the last output of a request that ended once and without an error."""
        ends = self.ends(request_id)
        assert len(ends) == 1, f"{request_id} ended {len(ends)} times: {ends}"
        assert isinstance(ends[0], OutputMessage), ends[0]
        return list(ends[0].engine_outputs.outputs[0].token_ids)

    def heard(self, request_id: str) -> list[int]:
        """Return the tokens of all outputs of a request whose client gets only the new tokens in each."""
        self.answer(request_id)
        return [token for one in self.told(request_id) for token in one.engine_outputs.outputs[0].token_ids]

    def error(self, request_id: str) -> str:
        """Return the one error that ended a request."""
        ends = self.ends(request_id)
        assert len(ends) == 1, f"{request_id} ended {len(ends)} times: {ends}"
        assert isinstance(ends[0], ErrorMessage), ends[0]
        return ends[0].error

    def expected(self, tokens: Sequence[int] = (1, 2, 3), stages: int | None = None) -> list[int]:
        """Return the tokens that the stages make of a prompt."""
        found = list(tokens)
        for stage_id in range(len(self.stages) if stages is None else stages):
            found = engine_output(stage_id, found)
        return found

    def left_over(self) -> dict[str, Any]:
        """Return all that is kept of requests; empty when all have left."""
        return left_over(self.omni, self.driver)


def _as_it_is(message: Any) -> Any:
    """Return a message that does not change any more: vLLM adds later tokens to the list of a cumulative output."""
    if isinstance(message, OutputMessage):
        message = copy.copy(message)
        output = message.engine_outputs = copy.copy(message.engine_outputs)
        if completions := getattr(output, "outputs", None):
            output.outputs = [copy.copy(one) for one in completions]
            for one in output.outputs:
                one.token_ids = list(one.token_ids)
    return message


def of(name: str | None = None, user: str | None = None) -> dict[str, Any]:
    """Return the parameters of a request of a class or a user."""
    return {"extra_args": {key: value for key, value in (("omni_class", name), ("omni_user", user)) if value} or None}
