"""Stages without engines: vLLM-Omni's own orchestrator, pools and output processors, over engines that are lists.

What an engine says is a function of its input (`said_by`): a run that is repeated says the same again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.engine import OmniEngineCoreOutput, OmniEngineCoreRequest
from vllm_omni.engine.messages import AbortRequestMessage, ErrorMessage, OutputMessage, StageSubmissionMessage
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.outputs.output_processor import MultimodalOutputProcessor

from vllm_omni_sched.omni.stages import repair, sharing
from vllm_omni_sched.omni.stages.graph import graph_of
from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
from vllm_omni_sched.omni.stages.policies import Policies
from vllm_omni_sched.stage_config import read_stage_options

CONNECTOR = "DictConnector"
AR, GENERATION, DIFFUSION = "OmniARScheduler", "OmniGenerationScheduler", "diffusion"
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@dataclass(frozen=True)
class StageSpec:
    """One stage. ``edge``: it gets payloads by a connector; ``kind``: its scheduler, or diffusion."""

    replicas: int = 1
    final_output: bool = False
    kind: str = AR
    max_num_seqs: int = 8
    edge: bool = False


FINAL = StageSpec(final_output=True)


def said_by(stage_id: int, inputs: Sequence[int]) -> list[int]:
    """The tokens that an engine of a stage makes of its input; the same always."""
    return [stage_id * 1000 + 1 + token % 100 for token in inputs]


class Edges:
    """All edges: a connector that keeps payloads in a dict, until they are got once."""

    def __init__(self) -> None:
        self.lying: dict[str, Any] = {}

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, None]:
        self.lying[put_key] = data
        return True, 1, None

    def get(self, from_stage: str, to_stage: str, get_key: str) -> tuple[Any, int] | None:
        return (self.lying.pop(get_key), 1) if get_key in self.lying else None

    def close(self) -> None:
        pass


if CONNECTOR not in OmniConnectorFactory._registry:
    OmniConnectorFactory.register_connector(CONNECTOR, lambda extra: extra["edges"])


class Replica:
    """An engine's client. Its engine holds requests, and says what the test tells it to."""

    stage_type = "llm"
    custom_process_input_func = None
    requires_multimodal_data = False

    def __init__(self, stage_id: int, spec: StageSpec, stages: Sequence[StageSpec], edges: Edges) -> None:
        self.stage_id, self.model_stage = stage_id, f"stage{stage_id}"
        self.final_output, self.final_output_type = spec.final_output, "text"
        self.engine_input_source = [stage_id - 1] if stage_id else []
        self.requests: dict[str, Any] = {}  # by the name that the engine knows
        self.took: list[str] = []
        self.aborted: list[str] = []
        self.dead = self.down = False
        self._fed = spec.edge
        self._feeds = stage_id + 1 < len(stages) and stages[stage_id + 1].edge
        self.refuses: Exception | None = None
        self._edges = edges
        self._inputs: dict[str, list[int]] = {}
        self._said: dict[str, int] = {}
        self._outputs: list[Any] = []

    async def add_request_async(self, request: Any, **_: Any) -> None:
        await asyncio.sleep(0)  # as sending does
        if self.dead:
            raise EngineDeadError
        if self.refuses is not None:
            raise self.refuses
        self.took.append(request.request_id)
        self.requests[request.request_id] = request

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self.aborted.append(name)
            self._forget(name)

    async def get_output_async(self) -> EngineCoreOutputs:
        if self.dead:
            raise EngineDeadError
        outputs, self._outputs = self._outputs, []
        return EngineCoreOutputs(outputs=outputs)

    def process_engine_inputs(self, outputs: list[Any], prompt: Any, streaming_context: Any = None) -> list[Any]:
        return [{"prompt_token_ids": list(outputs[0].outputs[0].cumulative_token_ids)}]

    def shutdown(self) -> None:
        self.down = True

    # ---- what the engine does

    def input_of(self, name: str) -> list[int] | None:
        """What the engine has of a request: its prompt, or the payload, if that has come."""
        if not self._fed:
            return list(self.requests[name].prompt_token_ids)
        if name not in self._inputs:
            external = self.requests[name].external_req_id
            got = self._edges.get(str(self.stage_id - 1), str(self.stage_id), f"{external}_{self.stage_id - 1}_0")
            if got is None:
                return None
            self._inputs[name] = got[0]
        return self._inputs[name]

    def say(self, name: str, tokens: Sequence[int], *, last: bool = False, error: bool = False) -> None:
        """Put out tokens of a request."""
        assert name in self.requests, f"stage {self.stage_id} has {list(self.requests)}, not {name}"
        reason = FinishReason.ERROR if error else FinishReason.STOP if last else None
        self._outputs.append(OmniEngineCoreOutput(request_id=name, new_token_ids=list(tokens), finish_reason=reason))
        if reason is not None:
            self._forget(name)

    def step(self, name: str, most: int = 1) -> None:
        """Say the next tokens of a request, and end with the last one."""
        inputs = self.input_of(name)
        assert inputs is not None, f"stage {self.stage_id} has no input of {name}"
        tokens, said = said_by(self.stage_id, inputs), self._said.get(name, 0)
        last = said + most >= len(tokens)
        if last and self._feeds:
            edge, external = (str(self.stage_id), str(self.stage_id + 1)), self.requests[name].external_req_id
            self._edges.put(*edge, f"{external}_{self.stage_id}_0", tokens)
        self._said[name] = said + most
        self.say(name, tokens[said : said + most], last=last)

    def finish(self, name: str) -> None:
        """Say all that is left to say of a request, and end."""
        self.step(name, 1 << 30)

    def _forget(self, name: str) -> None:
        self.requests.pop(name, None)
        self._inputs.pop(name, None)
        self._said.pop(name, None)


class DiffusionReplica(Replica):
    """An engine of a diffusion stage."""

    stage_type = DIFFUSION

    async def add_request_async(self, request_id: str, prompt: Any, params: Any, **_: Any) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        if self.dead:
            raise EngineDeadError
        assert isinstance(params, OmniDiffusionSamplingParams)
        self.took.append(request_id)
        self.requests[request_id] = prompt

    def get_diffusion_output_nowait(self) -> Any | None:
        if self.dead:
            raise EngineDeadError
        return self._outputs.pop(0) if self._outputs else None

    def finish(self, name: str) -> None:
        del self.requests[name]
        self._outputs.append(OmniRequestOutput(request_id=name, finished=True))


class Runtime:
    """vLLM-Omni's `StageRuntime`, as far as it starts replicas; it fails ``fails`` times, and waits for ``go``."""

    _stage_init_timeout = 1

    def __init__(self, make: Callable[[int], Replica], stages: Sequence[StageSpec]) -> None:
        self._make, self._stages = make, stages
        self.go = threading.Event()
        self.go.set()
        self.fails = self.starting = 0
        self.started: list[tuple[int, int]] = []

    def _prepare_stage_plans(self) -> list[Any]:
        return [
            SimpleNamespace(replicas=[SimpleNamespace(stage_id=i, replica_id=j) for j in range(spec.replicas)])
            for i, spec in enumerate(self._stages)
        ]

    def _initialize_replica(self, plan: Any, timeout: float) -> Replica:
        self.starting += 1
        self.go.wait(30)
        self.starting -= 1
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no device")
        self.started.append((plan.stage_id, plan.replica_id))
        return self._make(plan.stage_id)


class _Turns:
    """vLLM-Omni's monitor of its loop; ends the loop when a turn had nothing to do."""

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    def note_loop(self, *, idle: bool) -> None:
        if idle:
            self._event.set()

    def flush(self) -> None:
        pass


def pool_of(stage_id: int, stages: Sequence[StageSpec], edges: Edges) -> StagePool:
    """vLLM-Omni's pool, over engines that are lists."""
    spec = stages[stage_id]
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=spec.max_num_seqs, scheduler_cls=spec.kind),
        model_config=SimpleNamespace(
            max_model_len=4096,
            stage_connector_config={"name": CONNECTOR, "extra": {"edges": edges}} if spec.edge else None,
        ),
    )
    diffusion = spec.kind == DIFFUSION
    return StagePool(
        stage_id,
        [replica_of(stage_id, stages, edges) for _ in range(spec.replicas)],
        output_processor=None if diffusion else MultimodalOutputProcessor(None, log_stats=False),
        stage_vllm_config=config,
    )


def replica_of(stage_id: int, stages: Sequence[StageSpec], edges: Edges) -> Replica:
    kind = DiffusionReplica if stages[stage_id].kind == DIFFUSION else Replica
    return kind(stage_id, stages[stage_id], stages, edges)


def params(**how: Any) -> SamplingParams:
    """Of a request that says the same every time."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 16, "output_kind": CUMULATIVE} | how)


def submission(request_id: str, tokens: Sequence[int], each: Sequence[Any], **request: Any) -> StageSubmissionMessage:
    """What the engine's main thread sends for a request."""
    prompt = {"prompt_token_ids": list(tokens)} | request.pop("prompt", {})
    return StageSubmissionMessage(
        type="add_request",
        request_id=request_id,
        prompt=core_request(request_id, tokens, each[0], **request),
        original_prompt=prompt,
        output_prompt_text=None,
        sampling_params_list=list(each),
        final_stage_id=len(each) - 1,
        preprocess_ms=0.0,
        request_timestamp=time.time(),
        enqueue_ts=0.0,
        final_output_stage_ids=[len(each) - 1],
    )


def core_request(request_id: str, tokens: Sequence[int], sampling: Any, **more: Any) -> OmniEngineCoreRequest:
    """What an engine is sent."""
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
    """A pipeline: our orchestrator, turned by hand, over engines that are lists.

    Use it as an asynchronous context. Time stands still but for `tick`.

    Args:
        stages: in order; the last one makes the final output.
        options: as under ``omni_sched`` in the deploy YAML.
    """

    def __init__(self, *stages: StageSpec, async_chunk: bool = False, **options: Any) -> None:
        self.stages, self.edges = stages, Edges()
        self._options, self._async_chunk = options, async_chunk
        self.now = 1000.0
        self.messages: list[Any] = []

    async def __aenter__(self) -> Rig:
        self._held = repair.HELD_SECONDS, sharing.PAYLOAD_SECONDS
        repair.HELD_SECONDS, sharing.PAYLOAD_SECONDS = 0.005, 0.5
        pools = [pool_of(i, self.stages, self.edges) for i in range(len(self.stages))]
        config = read_stage_options(self._options, "the test")
        self.policies = Policies(config, graph_of(pools), self._async_chunk, Random(0))
        self.policies.publish = lambda: SimpleNamespace(close=lambda: None)  # type: ignore[method-assign,assignment,return-value]
        self.runtime = Runtime(lambda stage_id: replica_of(stage_id, self.stages, self.edges), self.stages)
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self.omni = ScheduledOrchestrator(
            policies=self.policies,
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
        repair.HELD_SECONDS, sharing.PAYLOAD_SECONDS = self._held

    # ---- time

    async def turn(self) -> None:
        """Let vLLM-Omni's own loop turn, until a turn has nothing to do."""
        self.omni._shutdown_event.clear()
        await self.omni._orchestration_loop()
        while not self._out.empty():
            self.messages.append(self._out.get_nowait())

    async def settle(self) -> None:
        """Turn until nothing moves any more; a start of a replica that is held back may go on."""
        for _ in range(400):
            await self.turn()
            held_back = 0 if self.runtime.go.is_set() else self.runtime.starting
            if len(self.omni._spawned) <= held_back:
                return
        raise AssertionError(f"it does not come to rest: {self.omni._spawned}")

    async def tick(self, seconds: float) -> None:
        """Time passes, and what looks at the stages now and then looks once."""
        self.now += seconds
        self.policies.watch.look(self.omni.stage_pools, self.now)
        self.omni.repair.tick()
        await self.omni.release()
        await self.settle()

    # ---- what clients do

    def message(self, request_id: str, tokens: Sequence[int] = (1, 2, 3), **how: Any) -> StageSubmissionMessage:
        """``each``: the sampling parameters by stage, default the same for all; else those of a request."""
        until = how.pop("stages", len(self.stages))
        each = how.pop("each", None) or [params(**how.pop("params", {})) for _ in range(until)]
        return submission(request_id, tokens, each, **how)

    async def ask(self, request_id: str, tokens: Sequence[int] = (1, 2, 3), **how: Any) -> None:
        """As `message`."""
        await self.omni._dispatch_message(self.message(request_id, tokens, **how))

    async def abort(self, *request_ids: str) -> None:
        await self.omni._handle_abort(AbortRequestMessage(request_ids=list(request_ids)))
        await self.settle()

    # ---- what engines do

    def replica(self, stage_id: int, replica_id: int = 0) -> Any:
        return self.omni.stage_pools[stage_id].clients[replica_id]

    def at(self, stage_id: int) -> dict[str, Any]:
        """The replica of each request that an engine of the stage has."""
        clients = [client for client in self.omni.stage_pools[stage_id].clients if client is not None]
        return {name: client for client in clients for name in client.requests}

    async def step(self, stage_id: int, *names: str) -> None:
        """One token more."""
        for name in names:
            self.at(stage_id)[name].step(name)
        await self.settle()

    async def finish(self, stage_id: int, *names: str) -> None:
        for name in names:
            self.at(stage_id)[name].finish(name)
        await self.settle()

    def replica_id(self, stage_id: int, name: str) -> int:
        """Where a request runs."""
        clients = self.omni.stage_pools[stage_id].clients
        return next(i for i, client in enumerate(clients) if client is not None and name in client.requests)

    async def kill(self, stage_id: int, replica_id: int = 0) -> None:
        self.replica(stage_id, replica_id).dead = True
        await self.settle()

    # ---- what came of it

    def told(self, request_id: str) -> list[Any]:
        """The outputs and errors of a request, in order."""
        return [
            one
            for one in self.messages
            if isinstance(one, OutputMessage | ErrorMessage) and one.request_id == request_id
        ]

    def ends(self, request_id: str) -> list[Any]:
        """Those that end it; one, if all is well."""
        return [one for one in self.told(request_id) if isinstance(one, ErrorMessage) or one.finished]

    def answer(self, request_id: str) -> list[int]:
        """The tokens of a request that ended once and well, as its client has put them together."""
        ends = self.ends(request_id)
        assert len(ends) == 1, f"{request_id} ended {len(ends)} times: {ends}"
        assert isinstance(ends[0], OutputMessage), ends[0]
        return list(ends[0].engine_outputs.outputs[0].token_ids)

    def heard(self, request_id: str) -> list[int]:
        """As `answer`, of one that gets only what is new."""
        self.answer(request_id)
        return [token for one in self.told(request_id) for token in one.engine_outputs.outputs[0].token_ids]

    def error(self, request_id: str) -> str:
        """The error that ended a request, once."""
        ends = self.ends(request_id)
        assert len(ends) == 1, f"{request_id} ended {len(ends)} times: {ends}"
        assert isinstance(ends[0], ErrorMessage), ends[0]
        return ends[0].error

    def expected(self, tokens: Sequence[int] = (1, 2, 3), stages: int | None = None) -> list[int]:
        """What the stages make of a prompt."""
        found = list(tokens)
        for stage_id in range(len(self.stages) if stages is None else stages):
            found = said_by(stage_id, found)
        return found

    def left_over(self) -> dict[str, Any]:
        """All that is kept of requests; empty, when all have left."""
        omni = self.omni
        kept = {
            "request_states": omni.request_states,
            "outlet": {**omni.outlet._said, **dict.fromkeys(omni.outlet._ended | omni.outlet._mute)},
            "keys": omni.sharing._keys,
            "known": self.policies.known,
            "grants": self.policies.grants,
            "works": omni.repair._works,
            "lost": omni.repair._lost,
            "parked": [one for each in omni.repair._parked.values() for one in each],
        }
        if omni.repair._policy is not None:
            kept["ledger"] = omni.repair._policy._ledger.entries
        if self.policies.credits is not None:
            capacity = self.policies.config.runtime.credits.capacity
            kept["credits"] = [
                one for one in self.policies.credits.order if self.policies.credits.free(one) != capacity
            ]
        for pool in omni.stage_pools:
            queue = pool.queue
            loads = {i: load.began for i, load in queue.policies._loads.items() if load.began}
            for name, of in {
                "waiting": queue.waiting,
                "running": queue.running,
                "followers": queue._parked,
                "serves": queue._serves,
                "held": queue.held,
                "merger": queue.merger._groups,
                "loads": loads,
                "bindings": pool._request_bindings,
                "processor": pool.output_processor.request_states if pool.output_processor is not None else (),
            }.items():
                kept[f"{name} of stage {pool.stage_id}"] = of
        return {name: dict(of) if isinstance(of, dict) else list(of) for name, of in kept.items() if of}
