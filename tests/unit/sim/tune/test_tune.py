"""Tuning, on functions whose optimum is known."""

import numpy as np
import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import read_options
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.sim.study.search import Measured, Tried, best_options, changed_options, propose, pruned
from vllm_omni_sched.sim.study.tune import Verdict, compare, paired_gain, resample
from vllm_omni_sched.sim.workloads.trace import Exact


def space(trial):
    options = {"mode": trial.suggest_categorical("mode", ("off", "on"))}
    if options["mode"] == "on":
        options["target"] = trial.suggest_float("target", 1.0, 100.0, log=True)
    return options | {"useless": trial.suggest_categorical("useless", (False, True))}


def one_of(name, *values):
    return lambda trial: {name: trial.suggest_categorical(name, values)}


def known(options, seed):
    """Best with ``mode`` on and ``target`` 20; a seed moves all alike."""
    noise = 0.02 * np.random.default_rng(seed).standard_normal()
    if options.get("mode") != "on":
        return Measured(0.5 + noise, 1.0)
    return Measured(0.9 - 0.2 * abs(np.log(options.get("target", 100.0) / 20)) + noise, 1.0)


# -- the space


class FirstOf:
    """Names the first value, or the least."""

    def suggest_categorical(self, name, choices):
        return choices[0]

    def suggest_float(self, name, low, high, *, log=False):
        return low

    def suggest_int(self, name, low, high, *, log=False):
        return low


class LastOf(FirstOf):
    def suggest_categorical(self, name, choices):
        return choices[-1]

    def suggest_float(self, name, low, high, *, log=False):
        return high

    def suggest_int(self, name, low, high, *, log=False):
        return high


@pytest.mark.parametrize("trial", [FirstOf(), LastOf()])
@pytest.mark.parametrize("encodes", [False, True])
@pytest.mark.parametrize("itl_seconds", [0.001, 0.1, 10.0])
def test_whatever_is_tried_is_a_valid_configuration(trial, encodes, itl_seconds):
    read_options(OmniSchedConfig, propose(trial, itl_seconds, encodes, max_num_seqs=4))


def test_an_option_that_does_not_matter_is_not_asked_for():
    assert "encode_lane_min_share" not in propose(FirstOf(), 0.1)
    assert "control_target_ms" not in propose(FirstOf(), 0.1)
    assert {"control_target_ms", "encode_lane_min_share"} <= propose(LastOf(), 0.1).keys()
    assert "encode_ahead" not in propose(LastOf(), 0.1, encodes=False)


# -- the search


def test_it_finds_the_known_optimum():
    found = best_options(space, known, range(2), trials=60, seed=1)
    assert found.tried[0].options["mode"] == "on"
    assert 14 < found.tried[0].options["target"] < 28
    assert (found.trials, found.interrupted) == (60, False)


def test_the_same_seed_tries_the_same():
    first, second = (best_options(space, known, [0], trials=15, seed=4) for _ in range(2))
    assert first == second
    assert first != best_options(space, known, [0], trials=15, seed=5)


def test_each_trial_runs_under_all_seeds_and_none_twice():
    had = []

    def evaluate(options, seed):
        had.append((tuple(options.items()), seed))
        return known(options, seed)

    best_options(one_of("mode", "off", "on"), evaluate, [3, 4, 5], trials=10, seed=1)
    assert sorted(had) == sorted(((("mode", mode),), seed) for mode in ("off", "on") for seed in (3, 4, 5))


def test_of_equal_ones_the_lower_ttft_wins_and_never_more_than_that():
    def evaluate(options, seed):
        return {"a": Measured(0.5, 2.0), "b": Measured(0.5, 1.0), "c": Measured(0.500002, 1e9)}[options["x"]]

    found = best_options(one_of("x", "a", "b", "c"), evaluate, [0], trials=30, seed=1)
    assert [one.options["x"] for one in found.tried] == ["c", "b", "a"]


def test_an_interrupt_keeps_the_best_so_far():
    runs = []

    def evaluate(options, seed):
        if len(runs) == 7:
            raise KeyboardInterrupt
        runs.append(known(options, seed))
        return runs[-1]

    found = best_options(space, evaluate, [0], trials=50, seed=1)
    assert found.interrupted
    assert 1 <= found.trials < 50
    assert found.tried[0].attainment == max(run.attainment for run in runs)


def test_progress_tells_the_best_so_far():
    said = []
    best_options(space, known, [0], trials=12, seed=2, progress=lambda done, best: said.append((done, best.attainment)))
    assert [done for done, _ in said] == list(range(1, 13))
    assert [best for _, best in said] == sorted(best for _, best in said)


def test_options_that_do_no_good_are_left_out():
    options = {"mode": "on", "target": 20.0, "useless": True}
    best = Tried(options, (known(options, 0),))
    assert pruned(best, known, [0]).options == {"mode": "on", "target": 20.0}


def test_what_is_as_by_default_need_not_be_told():
    assert changed_options({"mode": "on", "useless": False}, {"mode": "off", "useless": False}) == {"mode": "on"}


# -- the gain


def gain_of(differences, seed=0, **kwargs):
    return paired_gain(
        [0.5 + one for one in differences], [0.5] * len(differences), np.random.default_rng(seed), **kwargs
    )


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1, 0.12, 0.11, 0.09], Verdict.HELPS),
        ([-0.1, -0.12, -0.11, -0.09], Verdict.HARMS),
        ([0.1, -0.1, 0.05, -0.06], Verdict.UNKNOWN),
        ([0.0] * 5, Verdict.UNKNOWN),
    ],
)
def test_the_verdict(differences, verdict):
    gain = gain_of(differences)
    assert gain.verdict is verdict
    assert gain.mean == pytest.approx(np.mean(differences))
    assert gain.low <= gain.mean <= gain.high


def test_pairing_takes_out_what_seeds_have_in_common():
    random = np.random.default_rng(1)
    common = random.normal(0.5, 0.2, 20)
    assert paired_gain(list(common + 0.01), list(common), random).verdict is Verdict.HELPS
    assert paired_gain(list(random.permutation(common + 0.01)), list(common), random).verdict is Verdict.UNKNOWN


def test_the_interval_holds_about_as_often_as_it_says():
    random = np.random.default_rng(7)
    held = 0
    for at in range(200):
        gain = gain_of(random.normal(0.02, 0.05, 20), seed=at)
        held += gain.low <= 0.02 <= gain.high
    assert 0.88 <= held / 200 <= 0.98  # percentile bootstraps of 20 are a little short


DEFAULTS = {"defaults": {}}


def test_the_best_that_is_known_to_help_is_proposed():
    good, better, bad = {"mode": "on", "target": 40.0}, {"mode": "on", "target": 20.0}, {"mode": "on", "target": 1e3}
    found = compare([good, better, bad], known, range(100, 110), range(3), np.random.default_rng(0), DEFAULTS)
    name, proposed = found.proposed
    assert (name, proposed.options) == ("", better)
    gains = [one.over["defaults"].attainment for one in found.compared]
    assert [gain.verdict.value for gain in gains] == ["helps", "helps", "harms"]
    assert gains[0].mean == pytest.approx(0.4 - 0.2 * np.log(2))
    assert found.confidence == pytest.approx(1 - 0.05 / 3)


def test_what_is_there_stays_where_nothing_helps():
    def noise(options, seed):
        return Measured(0.5 + 0.1 * np.random.default_rng([seed, len(options)]).standard_normal(), 1.0)

    baselines = {"own": {"mode": "on"}}
    found = compare([{"useless": True}], noise, range(100, 120), range(3), np.random.default_rng(0), baselines)
    name, proposed = found.proposed
    assert (name, proposed.options) == ("own", {"mode": "on"})


def test_options_that_help_over_one_baseline_only_are_not_proposed():
    own, best = {"mode": "on", "target": 20.0}, {"mode": "on", "target": 21.0}
    baselines = {"own": own} | DEFAULTS
    found = compare([best], known, range(100, 110), range(3), np.random.default_rng(0), baselines)
    assert {name: gains.attainment.verdict.value for name, gains in found.compared[0].over.items()} == {
        "own": "harms",
        "defaults": "helps",
    }
    assert found.proposed[0] == "own"
    assert found.confidence == pytest.approx(1 - 0.05 / 3)


def test_defaults_that_are_better_than_what_is_there_are_proposed():
    baselines = {"own": {"mode": "on", "target": 1e3}} | DEFAULTS
    bad = {"mode": "on", "target": 5e2}
    found = compare([bad], known, range(100, 110), range(3), np.random.default_rng(0), baselines)
    name, proposed = found.proposed
    assert (name, proposed.options) == ("defaults", {})
    assert proposed.over["own"].attainment.mean > 0


def test_what_a_server_refuses_is_not_run():
    had = []

    def evaluate(options, seed):
        had.append(options)
        return known(options, seed)

    def accepted(options):
        return not options["useless"]

    found = best_options(space, evaluate, [0], trials=20, seed=1, accepted=accepted)
    assert found.trials == 20
    assert had
    assert not any(options["useless"] for options in had)
    best = Tried({"mode": "on", "useless": False}, (Measured(0.1, 1.0),))
    kept = pruned(best, known, [0], lambda options: "useless" in options)
    assert kept.options == {"useless": False}


@pytest.mark.parametrize(("seeds", "said"), [([2, 3, 4], r"\[2\] are both"), ([9], "at least 2")])
def test_held_out_seeds_are_others(seeds, said):
    with pytest.raises(ConfigError, match=said):
        compare([{}], known, seeds, [1, 2], np.random.default_rng(0), DEFAULTS)


# -- traces


TRACE = [Exact(float(at), 10 + at, 5) for at in range(600)]


def test_halves_of_a_trace_share_no_request():
    drawn = [
        {one.text_tokens for seed in range(30) for one in resample(TRACE, 600.0, np.random.default_rng(seed), held_out)}
        for held_out in (False, True)
    ]
    assert not drawn[0] & drawn[1]
    assert len(drawn[0] | drawn[1]) == len(TRACE)


def test_what_is_drawn_is_in_order_and_as_dense_as_the_trace():
    drawn = resample(TRACE, 600.0, np.random.default_rng(1), held_out=False)
    assert len(drawn) == 300
    assert [one.at for one in drawn] == sorted(one.at for one in drawn)
    assert 295 <= drawn[-1].at < 300


def test_a_trace_of_one_block_cannot_be_held_out():
    with pytest.raises(ConfigError, match="too few requests"):
        resample(TRACE[:1], 600.0, np.random.default_rng(1), held_out=True)
