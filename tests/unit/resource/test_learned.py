"""The learned prefill control: its rules, its guard, its file."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import read_options
from vllm_omni_sched.config.options import ControlMode, OmniSchedConfig
from vllm_omni_sched.resource.engine.control import make_control
from vllm_omni_sched.resource.engine.learned import (
    ARMS,
    FALLBACK,
    FEATURES,
    Interval,
    Learned,
    LearnedPrefill,
    LinearPolicy,
    RewardGuard,
    TrustReason,
    read,
    shipped,
)
from vllm_omni_sched.resource.engine.prefill_budget import AdaptivePrefill

ZERO = [[0.0] * len(FEATURES) for _ in ARMS]


def favours(arm):
    """Weights under which that arm is always the best."""
    return LinearPolicy([[1.0 if at == arm else 0.0] + [0.0] * (len(FEATURES) - 1) for at in range(len(ARMS))])


class Recorder:
    """Always the same arm; remembers what it was taught."""

    def __init__(self, arm, expected=0.0):
        self.arm, self.expected, self.learnt = arm, expected, []

    def choose(self, context):
        return self.arm

    def expects(self, context, arm):
        return self.expected

    def learn(self, context, arm, reward):
        self.learnt.append((context, arm, reward))


def plant(control, steps, base=0.01, token=1e-5, fill=1.0, start=0.0):
    """Steps that take base + token * size; when the last one ended."""
    now = start
    for _ in range(steps):
        size = int(control.limit * fill)
        seconds = base + token * size
        now += seconds
        control.observe(seconds, now, size)
    return now


# -- rule 1: the limit of AdaptivePrefill under the chosen aim


@pytest.mark.parametrize("arm", range(len(ARMS)))
def test_steps_take_what_the_chosen_arm_aims_at(arm):
    control = LearnedPrefill(favours(arm), 0.05, 0.1, 0.5, 64, 8192)
    plant(control, 400)
    assert 0.01 + 1e-5 * control.limit == pytest.approx(ARMS[arm] * 0.05, rel=0.05)


def test_the_fallback_arm_is_the_adaptive_control():
    learned, adaptive = LearnedPrefill(favours(FALLBACK), 0.05), AdaptivePrefill(0.05)
    rng, now = random.Random(3), 0.0
    for _ in range(300):
        seconds, size = rng.uniform(0.01, 0.1), rng.randrange(0, 9000)
        now += seconds
        learned.observe(seconds, now, size)
        adaptive.observe(seconds, now, size)
        assert (learned.limit, learned.reason) == (adaptive.limit, adaptive.reason)


# -- rule 2: intervals, context and reward


def test_a_choice_gets_its_reward_when_its_interval_ends():
    chooser = Recorder(4)
    control = LearnedPrefill(chooser, 0.05, 0.1, 1.0, 64, 8192, penalty=10.0)
    for step in range(1, 3):  # two intervals of 0.6 s: the second choice is the first to be rewarded
        control.observe(0.05, 0.5 * step, 64)
    assert chooser.learnt == []
    for at in (1.2, 1.4, 2.6):
        control.observe(0.05, at, 64)
    assert chooser.learnt == []
    control.observe(0.2, 3.7, 64)
    control.observe(0.05, 4.8, 64)
    (_, arm, reward), *_ = chooser.learnt
    assert arm == 4
    assert reward < 0


@pytest.mark.parametrize(
    ("steps", "reward"),
    [
        ([(0.05, 1000)] * 4, 0.2),  # 4000 tokens of 10 us in 0.2 s
        ([(0.05, 0)] * 4, 0.0),  # nobody waited
        ([(0.05, 0)] * 3 + [(0.2, 0)], -2.5),  # a quarter was late, ten times
        ([(0.01, 9000)], 1.0),  # never more than all of the time
    ],
)
def test_the_reward_is_the_time_for_prompts_minus_what_was_late(steps, reward):
    interval = Interval()
    for seconds, size in steps:
        interval.add(seconds, size, 1000, 0.1)
    assert interval.reward(1e-5, 10.0) == pytest.approx(reward)


def test_the_context_says_how_full_and_how_late_steps_were():
    interval = Interval()
    for seconds, size in [(0.04, 1000), (0.12, 1000), (0.02, 0), (0.3, 100)]:
        interval.add(seconds, size, 1000, 0.1)
    assert interval.context(0.1, 0.02, 1.5) == pytest.approx((1.0, 1.2, 0.2, 0.5, 0.5, 0.75))
    assert interval.longest_seconds == 0.12  # the longest was nearly empty: its prompts did not make it so


def test_a_clock_that_was_set_back_begins_a_new_interval():
    chooser = Recorder(0)
    control = LearnedPrefill(chooser, interval_seconds=1.0)
    for now in (100.0, 100.5, 5.0, 5.9):
        control.observe(0.05, now, 64)
    assert control.arm == FALLBACK
    control.observe(0.05, 6.0, 64)
    assert control.arm == 0


# -- rule 3: the guard


def test_while_the_guard_does_not_trust_the_choices_the_aim_is_the_target():
    chooser = Recorder(5, expected=0.9)  # nothing that comes is as good as what it expects of the fallback
    control = LearnedPrefill(chooser, interval_seconds=0.1, guard=RewardGuard(window=3, margin=0.1, rest=10))
    arms = []
    now = 0.0
    for _ in range(60):
        now += 0.1
        control.observe(0.05, now, 0)
        arms.append(control.arm)
    assert control.guard.reason is TrustReason.RESTING
    assert arms[-1] == FALLBACK
    assert 5 in arms


@pytest.mark.parametrize(
    ("lacks", "reasons"),
    [
        ([0.0] * 3, ["learning", "learning", "good"]),
        ([1.0] * 3, ["learning", "learning", "resting"]),
        ([0.1] * 3, ["learning", "learning", "good"]),  # within the margin
        ([1.0] * 3 + [0.0] * 2, ["learning", "learning", "resting", "resting", "on_trial"]),
        (
            [1.0] * 3 + [0.0] * 5,
            ["learning", "learning", "resting", "resting", "on_trial", "on_trial", "on_trial", "good"],
        ),
        # a trial that fails: the rest is twice as long
        (
            [1.0] * 3 + [0.0] * 2 + [1.0] * 3 + [0.0] * 4,
            ["learning", "learning", "resting", "resting", "on_trial", "on_trial", "on_trial", "resting"]
            + ["resting"] * 3
            + ["on_trial"],
        ),
    ],
)
def test_the_guard(lacks, reasons):
    guard = RewardGuard(window=3, margin=0.15, rest=2)
    assert [guard.observe(0.5 - lack, 0.5).value for lack in lacks] == reasons


def test_a_good_trial_makes_the_rest_short_again():
    guard = RewardGuard(window=2, margin=0.1, rest=2)
    for lack in [1, 1, 0, 0, 1, 1] + [0] * 4 + [0, 0, 0]:
        guard.observe(-lack, 0.0)
    assert guard.reason is TrustReason.GOOD
    guard.observe(-1, 0.0)
    assert [guard.observe(0, 0.0).value for _ in range(2)] == ["resting", "on_trial"]


# -- rule 4, and bounds


steps = st.lists(st.tuples(st.floats(0, 5), st.integers(0, 20_000), st.floats(0, 2)), max_size=60)
weights = st.lists(
    st.lists(st.floats(-10, 10), min_size=len(FEATURES), max_size=len(FEATURES)),
    min_size=len(ARMS),
    max_size=len(ARMS),
)


@given(weights, steps, st.integers(1, 100), st.integers(0, 8000))
def test_the_limit_stays_in_its_bounds_and_the_same_steps_give_the_same_limits(rows, given_steps, least, more):
    controls = [
        LearnedPrefill(LinearPolicy(rows), interval_seconds=0.2, minimum=least, maximum=least + more, guard=guard)
        for guard in (RewardGuard(2, 0.0, 1), RewardGuard(2, 0.0, 1))
    ]
    now = 0.0
    for seconds, size, gap in given_steps:
        now += gap
        for control in controls:
            control.observe(seconds, now, size)
            assert least <= control.limit <= least + more
        assert controls[0].limit == controls[1].limit
        assert controls[0].arm == controls[1].arm


def test_of_equal_arms_the_fallback_is_chosen():
    assert LinearPolicy(ZERO).choose((1.0,) * len(FEATURES)) == FALLBACK


@pytest.mark.parametrize(
    "make",
    [
        lambda: LinearPolicy(ZERO[1:]),
        lambda: LinearPolicy([row[1:] for row in ZERO]),
        lambda: LinearPolicy([[float("nan")] * len(FEATURES) for _ in ARMS]),
        lambda: LearnedPrefill(LinearPolicy(ZERO), promise_seconds=0.0),
        lambda: LearnedPrefill(LinearPolicy(ZERO), interval_seconds=float("inf")),
        lambda: LearnedPrefill(LinearPolicy(ZERO), penalty=-1.0),
        lambda: RewardGuard(window=1),
        lambda: RewardGuard(rest=0),
        lambda: RewardGuard(margin=-0.1),
    ],
)
def test_what_cannot_be(make):
    with pytest.raises(ConfigError):
        make()


# -- the file, and the option


def test_what_is_written_is_read_again():
    learned = Learned(favours(2), 7.0, {"seed": 1})
    again = read(learned.as_json(), "here")
    assert (again.policy.weights, again.penalty, again.provenance) == (learned.policy.weights, 7.0, {"seed": 1})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"arms": [1.0]}, "'arms' is"),
        ({"features": ["one"]}, "'features' is"),
        ({"format": "other"}, "'format' is"),
        ({"version": 2}, "version"),
        ({"penalty": -1}, "penalty"),
        ({"wieghts": []}, "wieghts"),
        ({"weights": ZERO[1:]}, "weights must be"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(change, said):
    body = json.loads(Learned(LinearPolicy(ZERO), 7.0, {}).as_json()) | change
    with pytest.raises(ConfigError, match=said):
        read(json.dumps(body), "here")


def test_what_is_shipped_says_where_it_is_from():
    provenance = shipped().provenance
    assert provenance["simulated"] is True
    assert {"command", "seed", "seeds", "settings", "date", "revision"} <= provenance.keys()


def test_the_option_makes_a_control_under_a_guard():
    config = OmniSchedConfig(prefill_control=ControlMode.LEARNED, control_target_ms=40.0, interactive_itl_ms=80.0)
    control = make_control(config.prefill_control, config, 64, 4096)
    assert isinstance(control, LearnedPrefill)
    assert (control.target_seconds, control.promise_seconds) == (0.04, 0.08)
    assert (control.minimum, control.maximum) == (64, 4096)
    assert control.guard is not None


def test_it_is_off_by_default_and_not_for_batches():
    assert OmniSchedConfig().prefill_control is ControlMode.OFF
    words = r"'expert\.batch_control' must be one of \['off', 'pid', 'aimd'\], got 'learned'"
    with pytest.raises(ConfigError, match=words):
        read_options(OmniSchedConfig, {"batch_control": "learned"})
