"""Measure options of a server under a load, and their gain under seeds that the search has not seen."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import KEY, load_config
from vllm_omni_sched.resource.engine.lane import LaneFacts, refusal
from vllm_omni_sched.sim.measure import Result, Run
from vllm_omni_sched.sim.scenario.loader import build
from vllm_omni_sched.sim.scenario.scenario import Scenario, problems_of
from vllm_omni_sched.sim.scenario.stages import EngineStage
from vllm_omni_sched.sim.study.search import SEQUENCES, TOKENS, Evaluate, Measured, Options, flags_of, policy_of
from vllm_omni_sched.sim.workloads.trace import Exact, read_trace, write_trace

_DRAWS = 10_000


class Verdict(str, Enum):
    """Verdict from the interval of a gain."""

    HELPS = "helps"  # all of it is above 0
    UNKNOWN = "unknown"  # contains 0
    HARMS = "harms"  # all of it is below 0


@dataclass(frozen=True)
class Gain:
    """The mean of paired differences, and its bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """Return the verdict from the interval."""
        if self.low > 0:
            return Verdict.HELPS
        return Verdict.HARMS if self.high < 0 else Verdict.UNKNOWN


def paired_gain(
    ours: Sequence[float], default: Sequence[float], rng: np.random.Generator, confidence: float = 0.95
) -> Gain:
    """Return the mean paired difference with a percentile bootstrap interval (Efron and Tibshirani, 1993, ch. 13).

    Raises:
        ValueError: the numbers of values differ, or there are fewer than 2.
    """
    if len(ours) != len(default) or len(ours) < 2:
        raise ValueError(f"pairs are needed, at least 2: got {len(ours)} and {len(default)}")
    more = np.asarray(ours, float) - np.asarray(default, float)
    means = more[rng.integers(0, len(more), (_DRAWS, len(more)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Gain(float(more.mean()), float(low), float(high))


@dataclass(frozen=True)
class Gains:
    """Gains of options over a baseline. ``attainment``: gain in it; ``ttft_p99``: in seconds, negative is sooner."""

    attainment: Gain
    ttft_p99: Gain


@dataclass(frozen=True)
class Compared:
    """Options under the held-out seeds. ``over``: their gains by the name of a baseline."""

    options: Options
    runs: tuple[Measured, ...]
    over: Mapping[str, Gains]

    @property
    def helps(self) -> bool:
        """Return whether it is known to be better than each baseline."""
        return all(one.attainment.verdict is Verdict.HELPS for one in self.over.values())


@dataclass(frozen=True)
class Comparison:
    """The best few and the baselines, by name: the present options first, then the server's defaults if those differ,
    then vLLM with its own flags tuned if those help.
    """

    baselines: Mapping[str, Compared]
    compared: tuple[Compared, ...]
    seeds: tuple[int, ...]
    confidence: float

    @property
    def now(self) -> str:
        """Return the name of the present options."""
        return next(iter(self.baselines))

    @property
    def proposed(self) -> tuple[str, Compared]:
        """Return the options to serve with, and their name if they are a baseline.

        1. Of the options that are known to help over all baselines, those with the largest gain over the present ones.
        2. Otherwise the baseline that is known to help most over the present options: the server's defaults, or
           vLLM's own flags.
        3. Otherwise the present options.
        """
        helps = [one for one in self.compared if one.helps]
        if helps:
            return "", max(helps, key=lambda one: one.over[self.now].attainment.mean)
        known = [item for item in self.baselines.items() if item[0] != self.now and item[1].helps]
        if known:
            return max(known, key=lambda item: item[1].over[self.now].attainment.mean)
        return self.now, self.baselines[self.now]


def compare(
    candidates: Sequence[Options],
    evaluate: Evaluate,
    seeds: Sequence[int],
    training_seeds: Sequence[int],
    rng: np.random.Generator,
    baselines: Mapping[str, Options],
) -> Comparison:
    """Run the candidates and the baselines under held-out seeds.

    1. The same seed gives all the same requests: differences are paired.
    2. Intervals hold for all comparisons together with 95 % (Bonferroni), so choosing the best does not bias them.

    Args:
        baselines: all options of each, by name; the first is the present one.

    Raises:
        ConfigError: a seed is one that the search has seen, or there are fewer than 2.
    """
    if shared := set(seeds) & set(training_seeds):
        raise ConfigError(f"held-out seeds must not be training seeds: {sorted(shared)} are both")
    if len(seeds) < 2:
        raise ConfigError(f"at least 2 held-out seeds are needed, got {len(seeds)}")
    pairs = (len(baselines) - 1) + len(candidates) * len(baselines)
    confidence = 1 - 0.05 / max(1, pairs)

    def measured(options: Options, beside: Mapping[str, Compared]) -> Compared:
        runs = tuple(evaluate(options, seed) for seed in seeds)
        over = {}
        for name, other in beside.items():
            both = ([run[at] for run in one] for at in range(2) for one in (runs, other.runs))
            gains = [paired_gain(ours, theirs, rng, confidence) for ours, theirs in zip(both, both, strict=True)]
            over[name] = Gains(*gains)
        return Compared(options, runs, over)

    known: dict[str, Compared] = {}
    for name, options in baselines.items():
        known[name] = measured(options, dict(list(known.items())[:1]))
    return Comparison(known, tuple(measured(one, known) for one in candidates), tuple(seeds), confidence)


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
    stages = tuple(stage.model_copy(update=sizes) if stage.name == tuned else stage for stage in scenario.stages)
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
