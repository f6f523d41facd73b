"""Compare controls on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.learning.predicting import serve_predicting
from benchmarks.learning.settings import Setting
from benchmarks.learning.train import INTERVAL_SECONDS, TARGET_SECONDS, act, serve
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.resource.engine.learned import Learned, LinearPolicy
from vllm_omni_sched.sim.episode import EpisodeResult

Control = Callable[[Setting, int], EpisodeResult]

FIXED = (0.5, 0.7, 0.85, 1.0, 1.25, 1.6)
METRICS = ("attainment", "goodput", "itl_p99", "ttft_p50", "throughput")


def options(setting: Setting, mode: str, aim: float = 1.0) -> OmniSchedConfig:
    """Return the options of one control; ``aim``: a fraction of the target."""
    return OmniSchedConfig.model_validate(
        {
            "prefill_control": mode,
            "control_target_ms": 1e3 * TARGET_SECONDS * aim,
            "control_interval_ms": 1e3 * INTERVAL_SECONDS,
            "encode_ahead": setting.encodes,
        }
    )


def plain(mode: str, aim: float = 1.0) -> Control:
    return lambda setting, seed: serve(setting, seed, options(setting, mode, aim))


def greedy(policy: LinearPolicy, penalty: float) -> Control:
    """Return the learnt policy alone, without its guard."""
    return lambda setting, seed: act(setting, seed, policy, penalty)


def guarded(learned: Learned) -> Control:
    """Return the learned control as it is shipped, with its guard."""

    def run(setting: Setting, seed: int) -> EpisodeResult:
        most = setting.limits.max_num_batched_tokens
        control = learned.control(TARGET_SECONDS, setting.targets[1], INTERVAL_SECONDS, 64, most)
        return serve(setting, seed, options(setting, "off"), control)

    return run


def controls(learned: Learned, best_fixed: float) -> dict[str, Control]:
    return {
        "off": plain("off"),
        "pid": plain("pid"),
        "pid + prediction": serve_predicting,
        "aimd": plain("aimd"),
        "adaptive": plain("adaptive"),
        f"adaptive, aim {best_fixed:g}": plain("adaptive", best_fixed),
        "learned": guarded(learned),
    }


def mean_attainment(control: Control, settings: Sequence[Setting], seeds: Sequence[int]) -> float:
    return float(np.mean([control(setting, seed).attainment for setting in settings for seed in seeds]))


def interval(values: Sequence[float], rng: np.random.Generator, draws: int = 2000) -> tuple[float, float, float]:
    """Return the mean, and its 95 % percentile bootstrap interval (Efron, 1979)."""
    found = np.asarray(values, float)
    means = found[rng.integers(0, len(found), (draws, len(found)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(found.mean()), float(low), float(high)


def summary(seen: dict[str, dict[str, list[EpisodeResult]]], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Return, by setting and control, each metric with its interval, and the gain of ``learned``, paired by seed."""
    records = []
    for setting, by_control in seen.items():
        for control, runs in by_control.items():
            values = {name: [getattr(one, name) for one in runs] for name in METRICS}
            learned = [one.attainment for one in by_control["learned"]]
            more = [ours - theirs for ours, theirs in zip(learned, values["attainment"], strict=True)]
            records.append(
                {"setting": setting, "control": control, "seeds": len(runs)}
                | {name: interval(found, rng) for name, found in values.items()}
                | {"learned_more": interval(more, rng)}
            )
    return records


def overall(seen: dict[str, dict[str, list[EpisodeResult]]], rng: np.random.Generator) -> dict[str, Any]:
    """Return the gain in attainment of ``learned`` over each other control: the mean over settings, paired by seed."""
    names = [name for name in next(iter(seen.values())) if name != "learned"]
    found = {}
    for name in names:
        more = np.mean(
            [
                [ours.attainment - theirs.attainment for ours, theirs in zip(by["learned"], by[name], strict=True)]
                for by in seen.values()
            ],
            axis=0,
        )
        found[name] = interval(list(more), rng)
    return found
