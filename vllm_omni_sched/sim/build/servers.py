"""Build the replicas of a stage, and its video decoders."""

import math
from collections.abc import Callable
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.sim.costs.base import DecoderCosts, EngineCosts
from vllm_omni_sched.sim.costs.measured import MeasuredCosts
from vllm_omni_sched.sim.costs.models import model
from vllm_omni_sched.sim.engine.hosted import HostedEngine
from vllm_omni_sched.sim.engine.limits import EngineLimits, make_core
from vllm_omni_sched.sim.engine.server import EngineServer
from vllm_omni_sched.sim.engine.steps import Watcher
from vllm_omni_sched.sim.host import Host
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.pools.replicas import Make
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.scenario.stages import (
    EncoderStage,
    EngineStage,
    ServersStage,
    VideoStage,
)
from vllm_omni_sched.sim.server import Done, Job, Server
from vllm_omni_sched.sim.servers.encoder import EncoderServer
from vllm_omni_sched.sim.servers.queue import QueueServer
from vllm_omni_sched.sim.servers.video import VideoServer, stock_decoding


def engine_limits(stage: EngineStage, encodes: bool, kv_tokens: int) -> EngineLimits:
    """Return the limits of an engine; vLLM's defaults where the scenario sets none.

    Encoder cache and budget hold the model's largest item, as in vLLM's ``compute_mm_encoder_budget``.
    """
    tokens = stage.max_num_batched_tokens
    embeds = max(tokens, largest_item(stage, stage.kv_tokens or kv_tokens))
    budget, reserve, each = stage.encoder_budget_embeds or embeds, stage.encoder_reserve_embeds, 0.0
    if stage.encode_bytes_per_embed is not None and stage.model is not None:
        each = model(stage.model).llm.kv_bytes_per_token(stage.devices) / stage.encode_bytes_per_embed
        kv_tokens -= math.ceil((budget if reserve is None else reserve) / each)
    return EngineLimits(
        stage.kv_tokens or kv_tokens,
        stage.max_num_seqs,
        tokens,
        budget,
        stage.encoder_cache_embeds or embeds,
        encodes,
        lane_items=stage.lane_items,
        paced=stage.lane_on != "device",
        lane_beside=stage.lane_on == "beside",
        reserve_embeds=reserve,
        embeds_per_token=each,
    )


def largest_item(stage: EngineStage, kv_tokens: int) -> int:
    """Return the embeddings of the model's largest item; 0 if only a calibration is known.

    vLLM does not start if the KV cache cannot hold one request of ``max_model_len``: operators have to lower it.
    """
    if stage.largest_item_embeds is not None:
        return stage.largest_item_embeds
    if stage.model is None:
        return 0
    shape = model(stage.model)
    return shape.largest_item(stage.max_model_len or min(shape.max_model_len, kv_tokens))


class Engines:
    """Replicas of an engine, each with its own core.

    ``made``: all replicas made for ``stage``, including dead ones. ``on_first_output``: called with each job that has
    its first token.
    """

    def __init__(
        self,
        sim: Simulator,
        scenario: Scenario,
        stage: EngineStage,
        costs: EngineCosts,
        itl: Histogram,
        watch: Callable[[int], Watcher] | None,
        host: Host | None = None,
    ) -> None:
        self._host = host
        self.stage = stage
        self._sim, self._scenario, self._costs, self._itl, self._watch = sim, scenario, costs, itl, watch
        self._limits = engine_limits(stage, scenario.encoder_of(stage) != "elsewhere", costs.kv_tokens)
        self._config = scenario.policy.model_copy(update={"encode_ahead": scenario.encoder_of(stage) == "lane"})
        self.made: list[EngineServer] = []
        self.on_first_output: Done | None = None

    def __call__(self, index: int, done: Done) -> Server:
        core = make_core(self._config, self._limits)
        watcher = self._watch(index) if self._watch is not None else None
        engine: EngineServer
        if isinstance(self._costs, MeasuredCosts) and (self._host is not None or self._costs.has_output_costs):
            host = Host(self._sim, 1) if self._host is None else self._host  # a front end of its own
            engine = HostedEngine(
                self._sim, self._costs, self._limits, core, done, self._itl, host, watcher, self._on_first_output
            )
        else:
            engine = EngineServer(
                self._sim, self._costs, self._limits, core, done, self._itl, watcher, self._on_first_output
            )
        self.made.append(engine)
        return engine

    def _on_first_output(self, job: Job) -> None:
        if self.on_first_output is not None:
            self.on_first_output(job)


def make_encoders(sim: Simulator, stage: EncoderStage, costs: EngineCosts) -> Make:
    """Return a factory of encoders that are separate from the LLM."""
    return lambda index, done: EncoderServer(sim, done, costs, stage.batch_items)


def make_decoders(sim: Simulator, stage: VideoStage, costs: DecoderCosts, rng: Random) -> Make:
    """Return a factory of nodes that decode video."""
    threads = 16 if stage.decoders == "cpu" else 1

    def make(index: int, done: Done) -> Server:
        if stage.collaborative:
            return VideoServer(sim, done, costs, stage.per_replica, stage.decoders, threads)
        engines = stage.decoders == "nvdec"
        return stock_decoding(sim, done, costs, stage.per_replica, rng, stage.per_replica, engines=engines)

    return make


def make_queues(sim: Simulator, stage: ServersStage, rng: Random) -> Make:
    """Return a factory of servers that each run one request at a time per place."""
    mean = stage.seconds
    exponential = stage.service == "exponential"

    def service(job: Job, rng: Random) -> float:
        return rng.expovariate(1 / mean) if exponential else mean

    return lambda index, done: QueueServer(sim, done, stage.per_replica, service, rng)
