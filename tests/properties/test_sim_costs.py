"""Costs never fall when there is more to do, or less to do it with."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.sim.costs.hardware import DEVICES, CoreDecoder, NvdecDecoder, device
from vllm_omni_sched.sim.costs.measured import Calibration, EncodeCosts, FrontendCosts, MeasuredCosts, StepCosts
from vllm_omni_sched.sim.costs.models import model
from vllm_omni_sched.sim.costs.roofline import RooflineCosts
from vllm_omni_sched.sim.work import Clip, Item, Request

_ENCODE = EncodeCosts(base_seconds=0.1, per_item=0.01, per_embed=1e-3)
MEASURED = MeasuredCosts(
    Calibration(
        version=1,
        source="made up",
        step=StepCosts(
            base_seconds=0.01, per_decode=1e-4, per_context_token=1e-7, per_prefill_token=1e-3, per_prefill_pair=1e-6
        ),
        encode={"image": _ENCODE, "video": _ENCODE},
        encode_in_lane={"image": _ENCODE, "video": _ENCODE},
        lane_slowdown=1.4,
        frontend=FrontendCosts(per_request=0.01, per_text_token=1e-5, per_item={"image": 0.01, "video": 0.1}),
        answer_seconds=0.001,
        kv_tokens=1000,
    )
)
ENGINES = [
    RooflineCosts(model("qwen2.5-vl-3b"), device("a100-80gb")),
    RooflineCosts(model("internvl3-78b"), device("h200-141gb"), 4),
    RooflineCosts(model("qwen2.5-vl-7b"), device("l40s"), 2),
    MEASURED,
]
engines = st.sampled_from(ENGINES)
shares = st.floats(0.01, 1.0)
more = st.integers(0, 5000)
modalities = st.sampled_from(["image", "video"])
decoders = st.sampled_from([CoreDecoder(), *(NvdecDecoder(kind) for kind in DEVICES.values() if kind.nvdec_engines)])


@settings(deadline=None)
@given(engines, st.tuples(more, more, more, more), st.tuples(more, more, more, more), shares, shares)
def test_steps(costs, base, added, share, other):
    small, large = min(share, other), max(share, other)
    least = costs.step_seconds(*base, large)
    assert 0 <= least <= costs.step_seconds(*base, small) < 1e4
    for at, extra in enumerate(added):
        grown = [value + extra * (i == at) for i, value in enumerate(base)]
        assert least <= costs.step_seconds(*grown, large)


@settings(deadline=None)
@given(engines, modalities, st.integers(1, 5000), st.integers(1, 50), more, st.integers(0, 50), shares, shares)
def test_encodes(costs, modality, each, items, longer, others, share, other):
    """More items are more of the same size: of one size in all, many small ones are less work than a large one."""
    small, large = min(share, other), max(share, other)
    for encode in (costs.encode_seconds, costs.lane_seconds):
        least = encode(modality, each * items, items, large)
        assert 0 < least <= encode(modality, each * items, items, small)
        assert least <= encode(modality, (each + longer) * items, items, large)
        assert least <= encode(modality, each * (items + others), items + others, large)


@settings(deadline=None)
@given(engines, shares, shares)
def test_what_the_lane_leaves(costs, share, other):
    assert 0 < costs.in_lane(max(share, other)) <= costs.in_lane(min(share, other)) <= 1


@settings(deadline=None)
@given(engines, modalities, more, more, more, st.integers(0, 9))
def test_the_front_end(costs, modality, text, added, embeds, items):
    def seconds(tokens, count, size):
        return costs.frontend_seconds(Request(0, 0.0, tokens, 1, (Item(modality, size, 1),) * count))

    least = seconds(text, items, embeds)
    assert 0 < least <= seconds(text + added, items, embeds)
    assert least <= seconds(text, items + 1, embeds)
    assert least <= seconds(text, items, embeds + added)


@settings(deadline=None)
@given(decoders, st.integers(1, 4000), st.integers(1, 4000), more, more, st.sampled_from(["h264", "hevc"]))
def test_frames(costs, width, height, frames, added, codec):
    clip = Clip(10.0, 30.0, width, height, 60, 8, codec)
    least = costs.frames_seconds(clip, frames)
    assert 0 <= least <= costs.frames_seconds(clip, frames + added)
    assert least <= costs.frames_seconds(clip._replace(width=width + added), frames)
    assert least <= costs.frames_seconds(clip._replace(height=height + added), frames)
