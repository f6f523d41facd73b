"""Train in episodes, one after another, with one exploring bandit."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from vllm_omni_sched.config import OmniSchedConfig
from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.resource.learned import Chooser, LearnedPrefill
from vllm_omni_sched.sim.episode import Seen, run_episode
from vllm_omni_sched.sim.learn.explore import ThompsonChooser
from vllm_omni_sched.sim.learn.settings import Setting

TARGET_SECONDS = 0.05
INTERVAL_SECONDS = 1.0

Episode = Callable[[Setting, int, Chooser], object]
"""Function that lets a chooser act in one setting under one seed."""


def act(setting: Setting, seed: int, chooser: Chooser, penalty: float) -> Seen:
    """Run one episode in which the chooser acts, and learns if it can."""
    limits = setting.limits
    control = LearnedPrefill(
        chooser,
        TARGET_SECONDS,
        setting.promise[1],
        INTERVAL_SECONDS,
        min(64, limits.max_num_batched_tokens),
        limits.max_num_batched_tokens,
        penalty,
    )
    return serve(setting, seed, OmniSchedConfig(encode_ahead=setting.encodes), control)


def serve(setting: Setting, seed: int, options: OmniSchedConfig, prefill: BatchControl | None = None) -> Seen:
    """Run one episode under these options."""
    return run_episode(
        setting.requests(seed),
        setting.costs,
        setting.limits,
        options,
        setting.seconds,
        setting.promise,
        prefill,
        drain_seconds=setting.seconds / 2,
    )


def train(
    settings: Sequence[Setting],
    seeds: Iterable[int],
    chooser: ThompsonChooser,
    random: np.random.Generator,
    episode: Episode,
    progress: Callable[[int], None] | None = None,
) -> ThompsonChooser:
    """Run each setting once under each seed; ``random`` draws the order of the settings for each seed.

    Args:
        progress: called with the number of episodes so far.
    """
    done = 0
    for seed in seeds:
        for at in random.permutation(len(settings)):
            episode(settings[at], seed, chooser)
            done += 1
            if progress is not None:
                progress(done)
    return chooser
