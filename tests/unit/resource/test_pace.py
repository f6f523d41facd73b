"""Steps that are held back for the lane's share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_sched.resource.engine.lane import DecodePace, PaceReason


def rest(share=1.0, busy=0.005, itl=0.01, target=0.05, *, encoding=True, decoding=True, prefill=False, fraction=0.8):
    return DecodePace(fraction).rest(share, busy, itl, target, encoding=encoding, decoding=decoding, prefill=prefill)


@pytest.mark.parametrize(
    ("asked", "seconds", "reason"),
    [
        ({"encoding": False}, 0.0, PaceReason.NOT_ENCODING),
        ({"decoding": False}, 0.0, PaceReason.NO_DECODE),
        ({"prefill": True}, 0.0, PaceReason.PREFILL),
        ({"itl": 0.051}, 0.0, PaceReason.OVER_TARGET),
        ({"share": 0.5}, 0.005, PaceReason.SHARE),
        ({"share": 0.75}, 0.015, PaceReason.SHARE),
        ({}, 0.035, PaceReason.TARGET),
        ({"itl": None}, 0.035, PaceReason.TARGET),
        ({"busy": 0.06}, 0.0, PaceReason.TARGET),
        ({"fraction": 0}, 0.0, PaceReason.TARGET),
    ],
)
def test_rules(asked, seconds, reason):
    found = rest(**asked)
    assert found == (pytest.approx(seconds), reason)


@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0.001, 1), st.floats(0, 1))
def test_a_step_and_its_rest_never_take_more_than_the_target(share, busy, target, fraction):
    seconds, _ = rest(share, busy, 0.0, target, fraction=fraction)
    assert seconds >= 0
    assert busy + seconds <= max(busy, fraction * target) + 1e-9
