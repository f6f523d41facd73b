"""Training: the bandit finds what is best where that is known, and tests share nothing with it."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.learning.settings import TEST, TEST_SEEDS, TRAINING, TRAINING_SEEDS, VALIDATION_SEEDS, Setting
from benchmarks.learning.train import ThompsonChooser, act, serve, train
from vllm_omni_sched.config.options import ControlMode, OmniSchedConfig
from vllm_omni_sched.resource.engine.learned import ARMS, FEATURES


def contexts(random, number):
    return np.concatenate([np.ones((number, 1)), random.random((number, len(FEATURES) - 1))], axis=1)


def best_arm(context):
    """The last arm where the last feature is large, else the first."""
    return len(ARMS) - 1 if context[-1] > 0.5 else 0


def teach(chooser, random, number):
    for context in contexts(random, number):
        arm = chooser.choose(tuple(context))
        sign = 1 if best_arm(context) == len(ARMS) - 1 else -1
        reward = {0: -sign, len(ARMS) - 1: sign}.get(arm, 0) * abs(context[-1] - 0.5) + random.normal(0, 0.05)
        chooser.learn(tuple(context), arm, reward)


def test_it_finds_the_best_arm_of_each_context():
    random = np.random.default_rng(1)
    chooser = ThompsonChooser(random)
    teach(chooser, random, 1500)
    policy = chooser.policy()
    asked = [one for one in contexts(random, 300) if abs(one[-1] - 0.5) > 0.15]
    right = sum(policy.choose(tuple(one)) == best_arm(one) for one in asked)
    assert right / len(asked) > 0.95


def test_it_tries_each_arm_and_then_fewer():
    random = np.random.default_rng(1)
    chooser = ThompsonChooser(random)
    teach(chooser, random, 1500)
    assert min(chooser.pulls) > 0
    assert chooser.pulls[0] + chooser.pulls[-1] > 0.7 * 1500


def test_the_mean_is_that_of_ridge_regression():
    random = np.random.default_rng(2)
    chooser = ThompsonChooser(random, ridge=0.5)
    seen, rewards = contexts(random, 40), random.random(40)
    for context, reward in zip(seen, rewards, strict=True):
        chooser.learn(tuple(context), 3, reward)
    ridge = np.linalg.solve(seen.T @ seen + 0.5 * np.eye(len(FEATURES)), seen.T @ rewards)
    assert chooser.policy().weights[3] == pytest.approx(ridge)
    assert chooser.expects(tuple(seen[0]), 3) == pytest.approx(seen[0] @ ridge)
    assert chooser.expects(tuple(seen[0]), 2) == 0


def test_without_spread_it_does_not_explore():
    chooser = ThompsonChooser(np.random.default_rng(1), spread=0.0)
    chooser.learn((1.0,) * len(FEATURES), 2, 1.0)
    assert {chooser.choose((1.0,) * len(FEATURES)) for _ in range(50)} == {2}


def test_the_same_seed_learns_the_same():
    def learn():
        random = np.random.default_rng(5)
        chooser = ThompsonChooser(random)
        teach(chooser, random, 50)
        return chooser.policy().weights

    assert learn() == learn()


def test_each_setting_comes_once_under_each_seed():
    had, told = [], []
    train(
        TRAINING,
        [7, 8],
        ThompsonChooser(np.random.default_rng(0)),
        np.random.default_rng(0),
        lambda setting, seed, chooser: had.append((seed, setting.name)),
        told.append,
    )
    assert sorted(had) == sorted((seed, one.name) for seed in (7, 8) for one in TRAINING)
    assert told == list(range(1, len(had) + 1))


def test_what_is_tested_on_was_not_trained_on():
    assert not set(TEST_SEEDS) & (set(TRAINING_SEEDS) | set(VALIDATION_SEEDS))
    assert not set(TRAINING_SEEDS) & set(VALIDATION_SEEDS)
    kinds = [{one.workload["kind"] for one in settings} for settings in (TRAINING, TEST)]
    assert not kinds[0] & kinds[1]
    assert len(TEST_SEEDS) >= 20


@pytest.mark.parametrize("setting", [*TRAINING, *TEST], ids=lambda one: one.name)
def test_each_setting_can_be_served(setting):
    seen = serve(replace(setting, seconds=4.0), 1, OmniSchedConfig(encode_ahead=setting.encodes))
    assert seen.requests >= 0


SHORT = Setting("short", {"kind": "text", "rate": 4.0}, seconds=5.0)


def test_an_episode_teaches_and_serves_the_same_requests_as_any_other():
    chooser = ThompsonChooser(np.random.default_rng(0))
    learnt = act(SHORT, 3, chooser, penalty=10.0)
    plain = serve(SHORT, 3, OmniSchedConfig(prefill_control=ControlMode.ADAPTIVE))
    assert sum(chooser.pulls) > 0
    assert learnt.requests == plain.requests > 0
    assert 0 <= learnt.attainment <= 1


def test_an_episode_is_the_same_under_the_same_seed():
    options = OmniSchedConfig(prefill_control=ControlMode.PID)
    assert serve(SHORT, 3, options) == serve(SHORT, 3, options)
    assert serve(SHORT, 3, options) != serve(SHORT, 4, options)
