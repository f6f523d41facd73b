"""Measure options under a load: a trace, different under each seed, or a scenario."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import KEY, load_config
from vllm_omni_sched.resource.engine.lane import LaneFacts, refusal
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.episode import run_episode
from vllm_omni_sched.sim.result import Run
from vllm_omni_sched.sim.scenario.checks import problems_of
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.scenario.stages import EngineStage
from vllm_omni_sched.sim.tune.search import Evaluate, Measured
from vllm_omni_sched.sim.tune.space import SEQUENCES, TOKENS, Options, flags_of, policy_of
from vllm_omni_sched.sim.work import Request
from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.replay import Replay, TraceOptions
from vllm_omni_sched.sim.workloads.trace import Trace

BLOCKS = 20
"""Least number of blocks into which a trace is cut."""
HELD_OUT = 1_000_000
"""The first held-out seed; those below are for training."""
_FIELDS = {TOKENS: "max_num_batched_tokens", SEQUENCES: "max_num_seqs"}


def on_trace(
    trace: Trace,
    replay: TraceOptions,
    costs: EngineCosts,
    limits: Callable[[Options], EngineLimits],
    targets: tuple[float, float],
) -> Evaluate:
    """Return a function that simulates one engine under a trace, with exactly the given options.

    Requests of a trace of intervals are drawn anew under each seed; for a trace of requests see `resample`.

    Args:
        limits: returns the sizes of an engine with these flags of vLLM.
        targets: TTFT and inter-token latency of the SLO, in seconds.
    """
    workload = Replay(trace, replay)
    whole = list(requests(workload, 0)) if trace.requests else []
    seconds = trace.arrivals / workload.rate

    def evaluate(options: Options, seed: int) -> Measured:
        config = load_config({KEY: policy_of(options)})
        arriving, length = requests(workload, seed), seconds
        if whole:
            rng = np.random.default_rng(seed)
            arriving, length = resample(whole, seconds, rng, held_out=seed >= HELD_OUT), seconds / 2
        seen = run_episode(arriving, costs, limits(flags_of(options)), config, length, targets, drain_seconds=60.0)
        return Measured(seen.attainment, seen.ttft_p99)

    return evaluate


def resample(
    requests: Sequence[Request],
    seconds: float,
    rng: np.random.Generator,
    held_out: bool,
) -> Iterator[Request]:
    """Yield requests like those of a trace: blocks of it, drawn with replacement (block bootstrap: Künsch, 1989).

    1. Blocks are half a minute long, or shorter where the trace has fewer than ``BLOCKS`` of them: what is
       correlated over longer times is lost.
    2. Every other block is for training, those between are held out: neither sees requests of the other.
    3. As many blocks are drawn as make half the trace. Contents of a block that is drawn again are others than before.

    Raises:
        ConfigError: one of the halves has no request.
    """
    number = max(BLOCKS, math.ceil(seconds / 30))
    length = seconds / number
    blocks: list[list[Request]] = [[] for _ in range(number)]
    for request in requests:
        blocks[min(int(request.arrival / length), number - 1)].append(request)
    ours = range(1 if held_out else 0, number, 2)
    if not any(blocks[at] for at in ours):
        raise ConfigError("the trace has too few requests to hold some of them out: record for longer")
    count, times = 0, [0] * number
    for place, at in enumerate(rng.choice(np.asarray(ours), size=number // 2).tolist()):
        again, times[at] = times[at] << 64, times[at] + 1
        for request in blocks[at]:
            arrival = request.arrival - at * length + place * length
            yield Request(
                count,
                max(arrival, 0.0),
                request.text_tokens,
                request.output_tokens,
                tuple(item._replace(content=item.content + again) for item in request.items),
                request.sla,
                request.client,
            )
            count += 1


def own_options(scenario: Scenario) -> Options:
    """Return the options in the scenario's ``[policy]``, in the form of an options file."""
    options: dict[str, Any] = scenario.policy.model_dump(mode="json", exclude_unset=True)
    return options


def with_options(scenario: Scenario, options: Options) -> Scenario:
    """Return the scenario as served with exactly these options; flags are those of the stage that is tuned.

    Raises:
        ConfigError: a server would refuse them; the message says why.
    """
    policy, flags, tuned = load_config({KEY: policy_of(options)}), flags_of(options), tunable(scenario).name
    sizes = {_FIELDS[name]: value for name, value in flags.items()}
    # where items are encoded follows from the policy, as in a server
    stages = tuple(
        stage.model_copy(update={"encoder": None})
        if isinstance(stage, EngineStage) and stage.encoder in ("lane", "in_step")
        else stage
        for stage in scenario.stages
    )
    stages = tuple(stage.model_copy(update=sizes) if stage.name == tuned else stage for stage in stages)
    changed = scenario.model_copy(update={"policy": policy, "stages": stages})
    for problem in problems_of(changed):
        raise ConfigError(problem)
    return changed


def on_scenario(scenario: Scenario, simulate: Run) -> Evaluate:
    """Return a function that simulates the scenario with exactly the given options, under other seeds."""

    def evaluate(options: Options, seed: int) -> Measured:
        result = simulate(with_options(scenario, options).model_copy(update={"seed": seed}))
        late = result.summary()["ttft_seconds"]["p99"]
        # no request has had a first token: as late as the run was long
        return Measured(result.attainment, result.seconds if late is None else late)

    return evaluate


def tunable(scenario: Scenario) -> EngineStage:
    """Return the stage whose options are searched.

    Raises:
        ConfigError: there is no such stage.
    """
    engines = [stage for stage in scenario.stages if isinstance(stage, EngineStage)]
    if not engines:
        raise ConfigError(f"'{scenario.name}' has no stage of kind 'engine': there is nothing to tune")
    return engines[0]


def has_lane(scenario: Scenario) -> bool:
    """Return whether all engines that have the encoder may encode ahead."""
    engines = [stage for stage in scenario.stages if isinstance(stage, EngineStage)]
    return not any(
        scenario.encoder_of(stage) == "elsewhere" or refusal(LaneFacts(workers=stage.devices)) is not None
        for stage in engines
        if stage.prompt_tokens is None
    )
