"""A calibration file, and the costs in it."""

import copy
import json
from functools import partial
from random import Random

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.base import SourceKind
from vllm_omni_sched.sim.costs.measured import MeasuredCosts, UnsteadyCosts
from vllm_omni_sched.sim.costs.roofline import engine_costs
from vllm_omni_sched.sim.work import Item, Request

FILE = {
    "format": "vllm-omni-sched calibration",
    "version": 1,
    "source": {"command": "vllm-omni-sched calibrate m", "cpu": "AMD EPYC", "date": "2026-11-22", "rounds": 3},
    "step": {
        "base_seconds": 0.01,
        "per_decode": 1e-4,
        "per_context_token": 1e-7,
        "per_prefill_token": 1e-3,
        "per_prefill_pair": 1e-6,
        "prefill_seconds": 0.002,
        "steadiness": [[0.5, 1.0], [0.99, 1.7]],
    },
    "encode": {"image": {"base_seconds": 0.1, "per_item": 0.01, "per_embed": 1e-3}},
    "encode_in_lane": {"image": {"base_seconds": 0.2, "per_item": 0.02, "per_embed": 2e-3}},
    "lane_slowdown": 1.5,
    "frontend": {"per_request": 0.002, "per_text_token": 1e-5, "per_item": {"image": 0.02}},
    "front_stall": {"image": 0.01},
    "answer_seconds": 0.0005,
    "residuals": {"points": 30},
    "kv_tokens": 4096,
}


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "engine.json"

    def write(change=lambda body: None):
        body = copy.deepcopy(FILE)
        change(body)
        path.write_text(json.dumps(body))
        return path

    return write


def test_every_number_counts(written):
    costs = MeasuredCosts.read(written())
    assert costs.step_seconds(2, 3000, 40, 500.0) == pytest.approx(0.01 + 2e-4 + 3e-4 + 0.04 + 5e-4 + 0.002)
    assert costs.step_seconds(2, 3000, 0, 0.0) == pytest.approx(0.01 + 2e-4 + 3e-4)
    assert costs.encode_seconds("image", 100, 3) == pytest.approx(0.1 + 0.03 + 0.1)
    assert costs.lane_seconds("image", 100, 3) == pytest.approx(0.2 + 0.06 + 0.2)
    request = Request(0, 0.0, 100, 5, (Item("image", 50, 1), Item("image", 50, 2)))
    assert costs.frontend_seconds(request) == pytest.approx(0.002 + 0.001 + 0.04)
    assert (costs.answer_seconds, costs.kv_tokens) == (0.0005, 4096)
    assert costs.calibration.step.steadiness == [(0.5, 1.0), (0.99, 1.7)]


def test_where_the_numbers_are_from(written):
    path = written()
    source = MeasuredCosts.read(path).source
    assert source.kind is SourceKind.MEASURED
    assert source.text == f"vllm-omni-sched calibrate m, AMD EPYC, 2026-11-22, {path}"
    named = MeasuredCosts.read(written(lambda body: body.update(source="by hand")))
    assert named.source.text == f"by hand ({path})"


def test_how_far_single_starts_are_from_the_costs_is_told_with_their_source(written):
    starts = {
        "server": {"steps": [1.0, 0.96, 1.06], "first_tokens": [0.9, 1.0, 1.0]},
        "with_lane": {"steps": [1.0, 1.1], "first_tokens": [1.0]},
    }
    text = MeasuredCosts.read(written(lambda body: body.update(starts=starts))).source.text
    assert text.endswith(
        "; single starts of the server: steps -4% to +6%, first tokens -10% to +0%, steps with encode-ahead +0% to +10%"
    )


def test_a_share_takes_longer_and_no_tokens_take_nothing(written):
    costs = MeasuredCosts.read(written())
    assert costs.step_seconds(1, 10, 0, 0.0, 0.5) == pytest.approx(2 * costs.step_seconds(1, 10, 0, 0.0))
    assert costs.encode_seconds("image", 9, 1, 0.5) == pytest.approx(2 * costs.encode_seconds("image", 9))
    assert costs.lane_seconds("image", 9, 1, 0.5) == pytest.approx(2 * costs.lane_seconds("image", 9))
    assert costs.step_seconds(0, 0, 0, 0.0) == 0.0


def test_steps_beside_the_lane_are_as_slow_as_measured(written):
    costs = MeasuredCosts.read(written())
    alone = costs.step_seconds(1, 10, 0, 0.0)
    assert costs.step_seconds(1, 10, 0, 0.0, costs.in_lane(1.0)) == pytest.approx(1.5 * alone)
    assert costs.step_seconds(1, 10, 0, 0.0, costs.in_lane(0.5)) == pytest.approx(1.25 * alone)
    quicker = MeasuredCosts.read(written(lambda body: body.update(lane_slowdown=0.98)))
    assert quicker.in_lane(1.0) == 1.0


def test_what_was_not_measured(written):
    costs = MeasuredCosts.read(written(lambda body: body.update(encode_in_lane=None)))
    with pytest.raises(ConfigError, match=r"engine.json: 'encode_in_lane' is null, no lane was measured"):
        costs.lane_seconds("image", 9)
    with pytest.raises(ConfigError, match=r"engine.json: 'encode' has image, but modality 'audio' arrives"):
        costs.encode_seconds("audio", 9)
    with pytest.raises(ConfigError, match=r"engine.json: 'frontend.per_item' has image, but modality 'audio' arrives"):
        costs.frontend_seconds(Request(0, 0.0, 1, 1, (Item("audio", 9, 1),)))


def put(*keys, value):
    def change(body):
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return change


def drop(*keys):
    def change(body):
        for key in keys[:-1]:
            body = body[key]
        del body[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("version", value=2), "key 'version': input should be 1, got 2"),
        (put("format", value="gpx"), "key 'format': .*got \"gpx\""),
        (put("kv_token", value=1), "unknown key 'kv_token'; did you mean 'kv_tokens'"),
        (put("step", "per_decod", value=1), "unknown key 'step.per_decod'; did you mean 'per_decode'"),
        (put("encode", "image", "x", value=1), "unknown key 'encode.image.x'; known are base_seconds, per_item"),
        (put("step", "per_decode", value=-1.0), "key 'step.per_decode': .*greater than or equal to 0, got -1.0"),
        (put("step", "per_decode", value="1"), "key 'step.per_decode': .*valid number, got \"1\""),
        (put("answer_seconds", value=float("inf")), "key 'answer_seconds': .*finite"),
        (put("lane_slowdown", value=0), "key 'lane_slowdown': .*greater than 0, got 0"),
        (put("frontend", "per_item", "image", value=-1.0), "key 'frontend.per_item.image'"),
        (drop("kv_tokens"), "key 'kv_tokens' is missing; write the file again"),
        (drop("encode", "image", "per_item"), "key 'encode.image.per_item' is missing"),
    ],
)
def test_the_file_and_the_key_are_named(written, change, says):
    with pytest.raises(ConfigError, match=rf"engine\.json: .*{says}"):
        MeasuredCosts.read(written(change))


def test_what_is_no_file_of_ours(tmp_path):
    with pytest.raises(ConfigError, match=r"the calibration '.*none.json' cannot be read: No such file"):
        MeasuredCosts.read(tmp_path / "none.json")
    half = tmp_path / "half.json"
    half.write_text('{"version": 1,')
    with pytest.raises(ConfigError, match=r"half.json: not valid JSON: "):
        MeasuredCosts.read(half)
    half.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"half.json: not a text file in UTF-8"):
        MeasuredCosts.read(half)


def test_a_stage_names_it(written):
    assert engine_costs("llm", "a100-80gb", calibration=written()).kv_tokens == 4096


def test_everything_takes_longer_under_the_load_of_a_server(written):
    def with_lane(body, **added):
        body["step"]["with_lane"] = 0.001
        body.update(added)

    plain = MeasuredCosts.read(written(with_lane))
    loaded = MeasuredCosts.read(written(partial(with_lane, under_load={"server": 1.5, "with_lane": 2.0})))
    request = Request(0, 0.0, 100, 5, (Item("image", 50, 1),))
    for before, after, factor in ((plain, loaded, 1.5), (plain.with_lane(), loaded.with_lane(), 2.0)):
        for asked in (
            lambda costs: costs.step_seconds(2, 3000, 40, 500.0),
            lambda costs: costs.encode_seconds("image", 100, 3),
            lambda costs: costs.lane_seconds("image", 100, 3),
            lambda costs: costs.frontend_seconds(request),
            lambda costs: costs.answer_seconds,
        ):
            assert asked(after) == pytest.approx(factor * asked(before))
        assert after.in_lane(1.0) == before.in_lane(1.0)
        unsteady = UnsteadyCosts(after, Random(1))
        assert unsteady.encode_seconds("image", 100, 3) == after.encode_seconds("image", 100, 3)
        assert unsteady.factor(0.5) == 1.0


def test_a_factor_of_the_one_server_counts_for_both_if_the_other_was_not_measured(written):
    costs = MeasuredCosts.read(written(lambda body: body.update(under_load={"server": 1.5})))
    assert costs.with_lane().answer_seconds == costs.answer_seconds == pytest.approx(1.5 * 0.0005)


@pytest.mark.parametrize("factor", [0, -1.0, "2", None])
def test_a_factor_that_is_none_is_named(written, factor):
    with pytest.raises(ConfigError, match=r"under_load\.server"):
        MeasuredCosts.read(written(lambda body: body.update(under_load={"server": factor})))
