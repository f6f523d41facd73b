"""What every stream of requests promises, and what each kind brings."""

from itertools import islice, pairwise

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.registry import KINDS, build

TABLES = {
    "servegen-mm-image": {"rate": 4.0},
    "video-clips": {"rate": 4.0},
    "text": {"rate": 4.0},
    "poisson": {"rate": 4.0},
    "mix": {"rate": 4.0, "parts": [{"kind": "text"}, {"kind": "video-clips", "weight": 0.5}]},
    "day-night": {"rate": 4.0, "season_seconds": 60.0, "noise": 0.3, "of": {"kind": "servegen-mm-image"}},
}

kinds = pytest.mark.parametrize("kind", TABLES)


def stream(kind, seed=1, number=500, **changes):
    return list(islice(requests(build({"kind": kind, **TABLES[kind], **changes}), seed), number))


def test_every_kind_is_here():
    assert set(TABLES) | {"trace", "statistics"} == set(KINDS)  # those two need a file


@kinds
def test_requests_are_in_order_and_numbered(kind):
    found = stream(kind)
    assert len(found) == 500
    assert [one.number for one in found] == list(range(500))
    assert all(a.arrival <= b.arrival for a, b in pairwise(found))


@kinds
def test_a_seed_is_a_stream(kind):
    assert stream(kind, 3) == stream(kind, 3)
    assert stream(kind, 3) != stream(kind, 4)


@kinds
def test_a_workload_keeps_no_state(kind):
    workload = build({"kind": kind, **TABLES[kind]})
    first = list(islice(requests(workload, 1), 300))
    assert list(islice(requests(workload, 1), 300)) == first


@pytest.mark.parametrize("kind", ["servegen-mm-image", "text", "video-clips", "poisson"])
def test_another_rate_brings_the_same_requests_closer_together(kind):
    slow, fast = stream(kind, rate=2.0), stream(kind, rate=8.0)
    for one, other in zip(slow, fast, strict=True):
        assert one.arrival == pytest.approx(other.arrival * 4)
        assert (one.items, one.text_tokens, one.output_tokens) == (other.items, other.text_tokens, other.output_tokens)


@pytest.mark.parametrize("kind", ["servegen-mm-image", "video-clips"])
def test_contents_differ(kind):
    found = [item.content for one in stream(kind) for item in one.items]
    assert len(set(found)) == len(found) > 30


def test_the_class_is_the_one_that_is_set():
    assert {one.sla for one in stream("text", sla="batch")} == {"batch"}
    assert {one.sla for one in stream("text")} == {"interactive"}


def test_images_have_embeds_and_text_has_none():
    images = stream("servegen-mm-image")
    assert {item.modality for one in images for item in one.items} == {"image"}
    assert all(1 <= item.embeds <= 1280 for one in images for item in one.items)
    assert {one.client for one in images} > set(range(10))
    assert not any(one.items for one in stream("text"))


def test_a_clip_is_what_has_to_be_decoded():
    found = stream("video-clips", number=300)
    clips = [one.items[0].clip for one in found]
    assert {clip.wanted for clip in clips} == {30, 60}
    assert {(clip.seconds, clip.width, clip.height) for clip in clips} == {(15.0, 640, 360)}
    assert {one.items[0].embeds for one in found} == {30 * 433, 60 * 433}
    assert max(one.prompt_tokens for one in found) == pytest.approx(26_000, rel=0.01)
    assert all(30 <= one.text_tokens <= 90 for one in found)


def test_clips_that_come_again_have_their_content():
    found = {one.items[0].content for one in stream("video-clips", distinct=5, frames=[8])}
    assert found == set(range(5))


def test_a_clip_in_pieces_has_the_frames_of_the_whole_one():
    whole, pieces = stream("video-clips", number=50), stream("video-clips", number=50, pieces=5)
    for one, cut in zip(whole, pieces, strict=True):
        assert len(cut.items) == 5
        assert sum(item.embeds for item in cut.items) == one.items[0].embeds
        assert sum(item.clip.wanted for item in cut.items) == one.items[0].clip.wanted
        assert sum(item.clip.seconds for item in cut.items) == one.items[0].clip.seconds
    contents = [item.content for one in pieces for item in one.items]
    assert len(set(contents)) == len(contents)


def test_parts_of_a_mix_have_their_weights_and_clients_of_their_own():
    found = stream("mix", number=3000)
    videos = [one for one in found if one.modality == "video"]
    assert len(videos) / len(found) == pytest.approx(1 / 3, abs=0.04)
    assert not {one.client for one in videos} & {one.client for one in found if one.modality == "text"}


def test_a_mix_may_hold_day_and_night_and_a_day_a_mix():
    inner = {"kind": "mix", "parts": [{"kind": "text"}, {"kind": "video-clips"}]}
    outer = {"kind": "mix", "rate": 5.0, "parts": [{"kind": "poisson"}, {"kind": "day-night", "of": inner}]}
    assert {one.modality for one in islice(requests(build(outer), 1), 2000)} == {"text", "video"}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, r"\[workload\]: option 'kind' must be one of .*, got None"),
        ({"kind": "servegen-image", "rate": 1.0}, "did you mean 'servegen-mm-image'"),
        ({"kind": "text"}, "option 'rate' is missing"),
        ({"kind": "text", "rate": 0.0}, "option 'rate': input should be greater than 0"),
        ({"kind": "video-clips", "rate": 1.0, "frames": [30, 0]}, "frames must be 1 or more"),
        (
            {"kind": "video-clips", "rate": 1.0, "pieces": 7},
            "option .pieces. must divide every number of .frames.: 7 and 30",
        ),
        ({"kind": "mix", "rate": 1.0, "parts": [{"kind": "text", "weight": 0}]}, r"parts\[0\]: option 'weight'"),
        (
            {"kind": "mix", "rate": 1.0, "parts": [{"kind": "text", "rate": 1.0}]},
            r"parts\[0\]: option 'rate' belongs to",
        ),
        ({"kind": "trace", "file": "nowhere.jsonl"}, "trace 'nowhere.jsonl' cannot be read"),
        ({"kind": "trace", "file": "x", "rate": 2.0, "scale": 3.0}, "both set the rate"),
    ],
)
def test_a_wrong_table_gets_one_error_that_names_the_key(table, said):
    with pytest.raises(ConfigError, match=said):
        build(table)
