"""Measure options under the load of a scenario, different under each seed."""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import KEY, load_config
from vllm_omni_sched.resource.engine.lane import LaneFacts, refusal
from vllm_omni_sched.sim.result import Result, Run
from vllm_omni_sched.sim.scenario.checks import problems_of
from vllm_omni_sched.sim.scenario.loader import build
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.scenario.stages import EngineStage
from vllm_omni_sched.sim.tune.search import SEQUENCES, TOKENS, Evaluate, Measured, Options, flags_of, policy_of
from vllm_omni_sched.sim.workloads.trace import Exact, read_trace, write_trace

BLOCKS = 20
"""Least number of blocks into which a trace is cut."""
HELD_OUT = 1_000_000
"""The first held-out seed; those below are for training."""
_FIELDS = {TOKENS: "max_num_batched_tokens", SEQUENCES: "max_num_seqs"}


def trace_scenario(
    source: Path, ttft: float, itl: float, machine: tuple[str, str, int], scale: float, item_embeds: int
) -> Scenario:
    """Return the scenario of a trace that one engine serves.

    Args:
        machine: the model, the accelerator, and how many of it.

    Raises:
        ConfigError: the trace cannot be read, a name is unknown, or the model does not fit.
    """
    model, device, devices = machine
    raw = {
        "name": f"{source.name} on {model} on {devices} x {device}",
        "drain_seconds": 60.0,
        "slo": {"ttft_seconds": ttft, "itl_seconds": itl},
        "workload": {"kind": "trace", "file": source.name, "scale": scale, "item_embeds": item_embeds},
        "cluster": {"device": device, "devices_per_node": max(devices, 8)},
        "stages": [{"kind": "engine", "name": "llm", "model": model, "devices": devices}],
    }
    return build(raw, source.name, source.parent)


def resample(requests: Sequence[Exact], seconds: float, rng: np.random.Generator, held_out: bool) -> list[Exact]:
    """Return requests like those of a trace: blocks of it, drawn with replacement (block bootstrap: Künsch, 1989).

    1. Blocks are half a minute long, or shorter where the trace has fewer than ``BLOCKS`` of them: what is
       correlated over longer times is lost.
    2. Every other block is for training, those between are held out: neither sees requests of the other.
    3. As many blocks are drawn as make half the trace.

    Raises:
        ConfigError: one of the halves has no request.
    """
    number = max(BLOCKS, math.ceil(seconds / 30))
    length = seconds / number
    blocks: list[list[Exact]] = [[] for _ in range(number)]
    for request in requests:
        blocks[min(int(request.at / length), number - 1)].append(request)
    ours = range(1 if held_out else 0, number, 2)
    if not any(blocks[at] for at in ours):
        raise ConfigError("the trace has too few requests to hold some of them out: record for longer")
    drawn: list[Exact] = []
    while not drawn:
        for place, at in enumerate(rng.choice(np.asarray(ours), size=number // 2).tolist()):
            begin = (place - at) * length
            drawn += [msgspec.structs.replace(one, at=max(one.at + begin, 0.0)) for one in blocks[at]]
    return drawn


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
    """Return a function that simulates the scenario with exactly the given options, under other seeds.

    A trace of exact requests is the same under each seed: it is drawn anew, see `resample`.
    """
    trace = read_trace(str(scenario.workload.options["file"])) if scenario.workload.kind == "trace" else None

    def evaluate(options: Options, seed: int) -> Measured:
        one = with_options(scenario, options).model_copy(update={"seed": seed})
        if trace is None or not trace.requests:
            return _measured(simulate(one))
        drawn = resample(trace.requests, trace.seconds, np.random.default_rng(seed), held_out=seed >= HELD_OUT)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "drawn.jsonl"
            write_trace(file, trace.header, drawn)
            workload = one.workload.model_copy(update={"options": {**one.workload.options, "file": str(file)}})
            half = {"workload": workload, "duration_seconds": one.duration_seconds / 2}
            return _measured(simulate(one.model_copy(update=half)))

    return evaluate


def _measured(result: Result) -> Measured:
    late = result.summary()["ttft_seconds"]["p99"]
    # no request has had a first token: as late as the run was long
    return Measured(result.attainment, result.seconds if late is None else late)


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
