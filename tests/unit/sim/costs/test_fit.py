"""Costs are found again from points that were made of them."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.fit import (
    STEP_COSTS,
    EncodePoint,
    FrontPoint,
    Observations,
    ServedAnswers,
    ServedFirst,
    ServerStart,
    StepPoint,
    fit,
    prefill_pairs,
    relative_fit,
    step_seconds,
)

STEP = dict(zip(STEP_COSTS, (4e-3, 1e-4, 2e-7, 5e-5, 1.5e-6, 2e-3), strict=True))
SHAPES = [(n, n * 50, 0, 0.0, 1) for n in (1, 2, 8, 32)]
SHAPES += [(4, 4 * length, 0, 0.0, 1) for length in (500, 2000)]
SHAPES += [(0, 0, length, prefill_pairs(0, length), 1) for length in (16, 64, 256, 1024)]
SHAPES += [(4, 100, 512, prefill_pairs(0, 512), 1), (0, 0, 3072, prefill_pairs(0, 3072), 2)]


def point(shape: tuple[int, int, int, float, int], times: float = 1.0) -> StepPoint:
    bare = StepPoint(*shape[:4], 0.0, shape[4])
    return bare._replace(seconds=times * step_seconds(STEP, bare))


def observations(**changes: object) -> Observations:
    seen = Observations(
        steps=[point(shape) for shape in SHAPES],
        fronts=[FrontPoint(n, "", 0, 2e-3 + 1e-5 * n) for n in (4, 64, 512)] + [FrontPoint(0, "image", 2, 32e-3)],
        answers=[1e-3, 2e-3, 9e-3],
    )
    for name, value in changes.items():
        setattr(seen, name, value)
    return seen


def test_a_step_is_taken_apart_again() -> None:
    found = fit(observations())
    assert {name: found["step"][name] for name in STEP} == pytest.approx(STEP, rel=1e-6)
    assert found["residuals"]["predicted_by_measured"]["min"] == pytest.approx(1.0)
    assert found["residuals"]["predicted_by_measured"]["max"] == pytest.approx(1.0)


def test_one_slow_round_of_three_does_not_count() -> None:
    steps = [point(shape, times) for times in (1.0, 1.0, 30.0) for shape in SHAPES]
    found = fit(observations(steps=steps))
    assert {name: found["step"][name] for name in STEP} == pytest.approx(STEP, rel=1e-6)
    assert found["residuals"]["points"] == len(SHAPES)


def test_one_slow_point_among_many_does_not_count_either() -> None:
    steps = [point((0, 0, n, prefill_pairs(0, n), 1), 4.0 if n == 112 else 1.0) for n in range(16, 400, 16)]
    found = fit(observations(steps=steps + [point(shape) for shape in SHAPES]))
    assert {name: found["step"][name] for name in STEP} == pytest.approx(STEP, rel=0.02)


def test_no_cost_is_negative_where_points_ask_for_it() -> None:
    # falling with the second column: the best weight for it is 0
    rows = [(1.0, n) for n in (1.0, 2.0, 3.0, 4.0)]
    base, per = relative_fit(rows, [4.0, 3.0, 2.5, 2.4])
    assert per == 0.0
    assert 2.4 < base < 4.0


def test_a_relative_error_counts_not_an_absolute_one() -> None:
    # one weight for two points that disagree: least squares of seconds would follow the long one
    (weight,) = relative_fit([(1.0,), (1000.0,)], [1.0, 2000.0])
    assert weight == pytest.approx((1.0 + 0.5) / (1.0 + 0.25))


def test_it_agrees_with_least_squares_where_that_is_positive() -> None:
    random = np.random.default_rng(3)
    rows = random.uniform(0.5, 2.0, (40, 4))
    values = rows @ np.array([3.0, 1.0, 2.0, 0.5]) * random.uniform(0.97, 1.03, 40)
    expected = np.linalg.lstsq(rows / values[:, None], np.ones(40), rcond=None)[0]
    assert (expected > 0).all()
    assert relative_fit(rows.tolist(), values.tolist()) == pytest.approx(expected.tolist())


def test_items_of_one_size_cost_by_their_embeddings() -> None:
    points = [EncodePoint("image", n, 576 * n, 0.05 + 0.25 * n) for n in (1, 2, 3)]
    (cost,) = fit(observations(encodes=points))["encode"].values()
    assert cost == pytest.approx({"base_seconds": 0.05, "per_item": 0.0, "per_embed": 0.25 / 576})


def test_items_of_several_sizes_cost_by_both() -> None:
    points = [EncodePoint("image", n, each * n, 0.01 + 0.1 * n + 1e-3 * each * n) for n in (1, 2) for each in (64, 576)]
    (cost,) = fit(observations(encodes=points))["encode"].values()
    assert cost == pytest.approx({"base_seconds": 0.01, "per_item": 0.1, "per_embed": 1e-3})


def test_the_front_end_is_a_constant_tokens_and_items() -> None:
    front = fit(observations())["frontend"]
    assert front["per_request"] == pytest.approx(2e-3)
    assert front["per_text_token"] == pytest.approx(1e-5)
    assert front["per_item"] == {"image": pytest.approx(15e-3)}


def test_without_a_lane_nothing_is_said_of_one() -> None:
    found = fit(observations())
    assert found["encode_in_lane"] is None
    assert found["lane_slowdown"] == 1.0


def test_with_a_lane() -> None:
    found = fit(observations(lane_encodes=[EncodePoint("image", 1, 576, 0.5)], lane_slowdowns=[1.2, 1.5, 9.0]))
    cost = found["encode_in_lane"]["image"]
    assert cost["base_seconds"] + 576 * cost["per_embed"] == pytest.approx(0.5)
    assert found["lane_slowdown"] == 1.5


def test_steadiness_is_a_table_of_parts() -> None:
    found = fit(observations(steadiness=[0.5] + [1.0] * 99 + [2.0]))["step"]["steadiness"]
    assert found[0] == [0.0, 0.5]
    assert [1.0, 2.0] in found
    assert [0.5, 1.0] in found


@pytest.mark.parametrize("kind", ["steps", "fronts", "answers"])
def test_what_is_always_needed(kind: str) -> None:
    with pytest.raises(ConfigError, match="one of them is missing"):
        fit(observations(**{kind: []}))


def test_pairs_of_chunks_add_up() -> None:
    assert prefill_pairs(0, 100) + prefill_pairs(100, 50) == prefill_pairs(0, 150)


PROMPTS = (20, 100, 400)


def served(
    per_request: float = 6e-3,
    longer: float = 5e-4,
    per_decode: float = 0.0,
    per_context: float = 0.0,
    prompts: float = 0.0,
    times: float = 1.0,
) -> ServerStart:
    """Return what a start of a server shows that adds these seconds to the engine of `observations`.

    Args:
        longer: of each step.
        per_decode: for each decoding request; ``per_context``: for each token that it reads.
        prompts: of each step with a prompt.
        times: how many times as long its steps take then.
    """
    step = {name: times * seconds for name, seconds in STEP.items()}
    step["base_seconds"] += times * longer
    step["per_decode"] += times * per_decode
    step["per_context_token"] += times * per_context
    step["prefill_seconds"] += times * prompts
    shapes = [(n, n * 60, 0, 0.0) for n in (1, 4, 16)] + [(n, n * 700, 0, 0.0) for n in (1, 4)]
    shapes += [(2, 140, tokens, prefill_pairs(0, tokens)) for tokens in PROMPTS]
    bare = [StepPoint(*shape, 0.0) for shape in shapes]
    answers = [
        ServedAnswers(n, tokens, tokens * n, 5e-3 * n + 2e-4 * tokens + 1e-4 * tokens * n)
        for n, tokens in ((1, 96), (4, 96), (16, 96), (16, 8))
    ]
    firsts = []
    for tokens in PROMPTS:
        alone = StepPoint(0, 0, tokens, prefill_pairs(0, tokens), 0.0)
        firsts.append(ServedFirst(tokens, "", 0, per_request + 2e-5 * tokens + step_seconds(step, alone) + 2e-3))
    return ServerStart([one._replace(seconds=step_seconds(step, one)) for one in bare], firsts, [], answers)


def test_behind_a_server_a_request_its_outputs_and_its_steps_take_longer() -> None:
    found = fit(observations(starts=[served()]))
    assert found["step"]["base_seconds"] == pytest.approx(STEP["base_seconds"] + 5e-4, rel=1e-6)
    for name in ("per_decode", "prefill_seconds", "per_prefill_token", "per_prefill_pair"):
        assert found["step"][name] == pytest.approx(STEP[name], rel=1e-6)
    front = found["frontend"]
    assert front["per_request"] == pytest.approx(6e-3, rel=1e-4)
    assert front["per_text_token"] == pytest.approx(2e-5, rel=1e-3)
    assert (front["per_step"], front["per_output"]) == pytest.approx((2e-4, 1e-4), rel=1e-3)


def test_what_grows_with_the_requests_or_comes_with_a_prompt_is_no_constant_of_each_step() -> None:
    step = fit(observations(starts=[served(per_decode=3e-4, per_context=1e-6, prompts=3e-3)]))["step"]
    assert step["base_seconds"] == pytest.approx(STEP["base_seconds"] + 5e-4, rel=1e-4)
    assert step["per_decode"] == pytest.approx(STEP["per_decode"] + 3e-4, rel=1e-4)
    assert step["per_context_token"] == pytest.approx(STEP["per_context_token"] + 1e-6, rel=1e-3)
    assert step["prefill_seconds"] == pytest.approx(STEP["prefill_seconds"] + 3e-3, rel=1e-3)


def test_one_first_token_that_seems_to_need_no_front_end_does_not_decide() -> None:
    """Relative to the little that is left without the step, its error would outweigh all others."""
    start = served()
    quick = start.firsts[-1]
    start.firsts += start.firsts * 2
    start.firsts[-1] = quick._replace(seconds=quick.seconds - 13.9e-3)
    front = fit(observations(starts=[start]))["frontend"]
    assert front["per_request"] == pytest.approx(6e-3, rel=1e-2)
    assert front["per_text_token"] == pytest.approx(2e-5, rel=0.05)


def test_costs_are_those_of_the_median_start_and_the_others_are_told() -> None:
    # the start in the middle is the one without a change, in whichever order they come
    found = fit(observations(starts=[served(times=1.5), served(times=0.9), served()]))
    assert found["step"]["base_seconds"] == pytest.approx(STEP["base_seconds"] + 5e-4, rel=1e-3)
    assert found["step"]["per_decode"] == pytest.approx(STEP["per_decode"], rel=1e-3)
    times = found["starts"]["server"]
    assert times["steps"] == pytest.approx([1.5, 0.9, 1.0], rel=1e-3)
    assert times["first_tokens"][1] < times["first_tokens"][2] < times["first_tokens"][0]
    assert "with_lane" not in found["starts"]


@pytest.mark.parametrize(("differ", "found_seconds"), [(-1e-3, -1e-3), (2e-3, 2e-3), (-1.0, -4.5e-3)])
def test_steps_of_a_server_that_encodes_ahead_differ_by_a_constant(differ: float, found_seconds: float) -> None:
    """A step takes time at least for its tokens, so the difference takes away its constant at most."""
    seen = observations(starts=[served()], lane_starts=[served()])
    seen.lane_starts[0].steps = [one._replace(seconds=one.seconds + differ) for one in seen.lane_starts[0].steps]
    step = fit(seen)["step"]
    assert step["base_seconds"] == pytest.approx(STEP["base_seconds"] + 5e-4, rel=1e-6)
    assert step["with_lane"] == pytest.approx(found_seconds, rel=1e-6)


def test_a_server_that_encodes_ahead_is_compared_with_the_other_one_of_the_same_time() -> None:
    """The machine is slower for a while: two of three starts that encode ahead, and one of the others, are slow."""
    seen = observations(starts=[served(), served(), served(times=1.5)])
    seen.lane_starts = [served(longer=8e-4), served(longer=8e-4, times=1.5), served(longer=8e-4, times=1.5)]
    found = fit(seen)
    assert found["step"]["with_lane"] == pytest.approx(4.5e-4, rel=1e-6)  # in the last pair: half as much again
    assert len(found["starts"]["with_lane"]["steps"]) == 3


def test_an_image_costs_a_server_what_its_encode_and_its_prompt_do_not_explain() -> None:
    seen = observations(starts=[served(longer=0.0)], encodes=[EncodePoint("image", 1, 576, 0.0576)])
    bare = StepPoint(0, 0, 576, prefill_pairs(0, 576), 0.0)
    seconds = 6e-3 + 2e-2 + step_seconds(STEP, bare) + 0.0576 + 2e-3
    seen.starts[0].firsts.append(ServedFirst(576, "image", 1, seconds))
    assert fit(seen)["frontend"]["per_item"]["image"] == pytest.approx(2e-2, rel=1e-3)


def test_without_a_server_the_front_end_is_as_in_the_engines_process() -> None:
    assert "per_output" not in fit(observations())["frontend"]


def test_the_variation_of_steps_is_that_which_clients_of_a_server_see() -> None:
    seen = observations(steadiness=[1.0] * 50, starts=[served()])
    seen.starts[0].steadiness += [1.5] * 50
    assert {factor for _, factor in fit(seen)["step"]["steadiness"]} == {1.5}
