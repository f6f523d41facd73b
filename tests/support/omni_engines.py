"""Engines that are lists, and what vLLM-Omni has around them: clients, pools, connectors, the runtime.

What an engine says is a function of its input (`engine_output`): a run that is repeated says the same again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
from vllm_omni.engine import OmniEngineCoreOutput
from vllm_omni.engine.stage_pool import StagePool
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.outputs import OmniRequestOutput
from vllm_omni.outputs.output_processor import MultimodalOutputProcessor

from vllm_omni_sched.connector_names import register_names
from vllm_omni_sched.omni.branch_connector import MARK

CONNECTOR = "DictConnector"
AR, GENERATION, DIFFUSION = "OmniARScheduler", "OmniGenerationScheduler", "diffusion"
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@dataclass(frozen=True)
class StageSpec:
    """Specifies a stage. ``edge``: it gets payloads by a connector; ``kind``: its scheduler, or diffusion.

    ``sources``: the stages that it reads; None: the one before. ``chunks``: it is in async-chunk mode.
    """

    replicas: int = 1
    final_output: bool = False
    kind: str = AR
    max_num_seqs: int = 8
    edge: bool = False
    sources: tuple[int, ...] | None = None
    chunks: bool = False

    def reads(self, stage_id: int) -> list[int]:
        if self.sources is not None:
            return list(self.sources)
        return [stage_id - 1] if stage_id else []


def branches(stages: Sequence[StageSpec]) -> bool:
    """Whether the stages are more than a line."""
    return any(spec.reads(at) != ([at - 1] if at else []) for at, spec in enumerate(stages))


def connector_spec(stages: Sequence[StageSpec], edges: Edges) -> dict[str, Any]:
    """The connector of all edges, as in the config of a stage."""
    if not branches(stages):
        return {"name": CONNECTOR, "extra": {"edges": edges}}
    carried = [[source, at] for at, spec in enumerate(stages) if spec.edge for source in spec.reads(at)]
    extra = {"connector": CONNECTOR, "extra": {"edges": edges}, "edges": carried}
    chunked = [at for at, spec in enumerate(stages) if spec.edge and spec.chunks]
    return {"name": "OmniBranchConnector", "extra": extra | ({"chunked": chunked} if chunked else {})}


FINAL = StageSpec(final_output=True)


def engine_output(stage_id: int, inputs: Sequence[int]) -> list[int]:
    """Return the tokens that an engine of a stage makes of its input; equal inputs give equal tokens."""
    return [stage_id * 1000 + 1 + token % 100 for token in inputs]


class Edges:
    """Carries the payloads of all edges; keeps payloads in a dict until they are got once."""

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
    """Client of an engine that holds requests and emits what the test tells it to."""

    stage_type = "llm"
    custom_process_input_func = None
    requires_multimodal_data = False

    def __init__(self, stage_id: int, spec: StageSpec, stages: Sequence[StageSpec], edges: Edges) -> None:
        self.stage_id, self.model_stage = stage_id, f"stage{stage_id}"
        self.final_output, self.final_output_type = spec.final_output, "text"
        self.engine_input_source = spec.reads(stage_id)
        self.requests: dict[str, Any] = {}  # by the name that the engine knows
        self.took: list[str] = []
        self.aborted: list[str] = []
        self.dead = self.down = False
        self._fed = spec.edge
        self._feeds = any(stage_id in one.reads(at) and one.edge for at, one in enumerate(stages))
        self._branches = branches(stages)
        self._chunks = spec.chunks
        self._sources = spec.reads(stage_id)
        if self._branches:
            register_names()
            edges = OmniConnectorFactory.create_connector(ConnectorSpec(**connector_spec(stages, edges)))
        self.refuses: Exception | None = None
        self._edges = edges
        self.sends_late = False  # what it makes goes out with `send`, and is lost if it dies before
        self._held_back: list[tuple[Any, ...]] = []
        self._names: dict[str, str] = {}  # as the engine was given them, if they say more
        self._inputs: dict[str, list[int]] = {}
        self._said: dict[str, int] = {}
        self._outputs: list[Any] = []

    async def add_request_async(self, request: Any, **_: Any) -> None:
        await asyncio.sleep(0)  # as sending does
        if self.dead:
            raise EngineDeadError
        if self.refuses is not None:
            raise self.refuses
        name = request.request_id.partition(MARK)[0]
        self._names[name] = request.request_id
        self.took.append(name)
        self.requests[name] = request

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for one in request_ids:
            name = one.partition(MARK)[0]
            self.aborted.append(name)
            self._forget(name)

    async def get_output_async(self) -> EngineCoreOutputs:
        if self.dead:
            raise EngineDeadError
        outputs, self._outputs = self._outputs, []
        return EngineCoreOutputs(outputs=outputs)

    def process_engine_inputs(self, outputs: list[Any], prompt: Any, streaming_context: Any = None) -> list[Any]:
        return [{"prompt_token_ids": [token for one in outputs for token in one.outputs[0].cumulative_token_ids]}]

    def shutdown(self) -> None:
        self.down = True

    # ---- what the engine does

    def input_of(self, name: str) -> list[int] | None:
        """Return the input of a request in the engine: its prompt, or the payload, if that has come."""
        if not self._fed:
            return list(self.requests[name].prompt_token_ids)
        if name not in self._inputs:
            external = self.requests[name].external_req_id
            got = self._edges.get(str(self.stage_id - 1), str(self.stage_id), f"{external}_{self.stage_id - 1}_0")
            if got is None:
                return None
            payload = got[0]
            if self._branches:
                payload = [token for source in self._sources for token in payload["tokens"][str(source)]]
            self._inputs[name] = payload
        return self._inputs[name]

    def say(self, name: str, tokens: Sequence[int], *, last: bool = False, error: bool = False) -> None:
        """Put out tokens of a request."""
        assert name in self.requests, f"stage {self.stage_id} has {list(self.requests)}, not {name}"
        reason = FinishReason.ERROR if error else FinishReason.STOP if last else None
        given = self._names[name]
        self._outputs.append(OmniEngineCoreOutput(request_id=given, new_token_ids=list(tokens), finish_reason=reason))
        if reason is not None:
            self._forget(name)

    def step(self, name: str, most: int = 1) -> None:
        """Say the next tokens of a request, and end with the last one."""
        inputs = self.input_of(name)
        assert inputs is not None, f"stage {self.stage_id} has no input of {name}"
        tokens, said = engine_output(self.stage_id, inputs), self._said.get(name, 0)
        last = said + most >= len(tokens)
        if last and self._feeds:
            request = self.requests[name]
            # as vLLM-Omni's workers do: only a stage that receives payloads knows the external id
            external = request.external_req_id if self._fed else request.request_id
            edge = str(self.stage_id), str(self.stage_id + 1)
            payload = {"tokens": {str(self.stage_id): tokens}} if self._branches else tokens
            if self._chunks and self._branches:
                payload["meta"] = {"finished": True}
            self._held_back.append((*edge, f"{external}_{self.stage_id}_0", payload))
            if not self.sends_late:
                self.send()
        self._said[name] = said + most
        self.say(name, tokens[said : said + most], last=last)

    def send(self) -> None:
        """Send what it has made and held back."""
        for message in self._held_back:
            self._edges.put(*message)
        self._held_back.clear()

    def finish(self, name: str) -> None:
        """Say all that is left to say of a request, and end."""
        self.step(name, 1 << 30)

    def _forget(self, name: str) -> None:
        self.requests.pop(name, None)
        self._inputs.pop(name, None)
        self._said.pop(name, None)


class DiffusionReplica(Replica):
    """Client of an engine of a diffusion stage."""

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
    _omni_master_server: Any = None

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


def pool_of(stage_id: int, stages: Sequence[StageSpec], edges: Edges) -> StagePool:
    """vLLM-Omni's pool, over engines that are lists."""
    spec = stages[stage_id]
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=spec.max_num_seqs, scheduler_cls=spec.kind),
        model_config=SimpleNamespace(
            max_model_len=4096,
            **({"async_chunk": spec.chunks} if branches(stages) else {}),
            stage_connector_config=connector_spec(stages, edges) if spec.edge else None,
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
