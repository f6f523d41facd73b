"""The model of `benchmarks.video_engines`: what it must obey, whatever the policies do."""

import numpy as np
import pytest

from benchmarks.video_engines.model import Shape, index_of, seconds_until_done
from vllm_omni_sched.video.plan import Rates, plan

RATES = Rates(per_pixel=1e-9, per_byte=0.0, per_piece=1e-3)
SHORT = Shape(seconds=10, gop=30)


def all_of(index):
    return list(range(len(index.packets)))


def test_the_made_up_video_has_every_frame_once_and_a_start_for_each_gop():
    index = index_of(Shape(seconds=10, gop=70))
    assert sorted(index.packets["pts"]) == all_of(index)
    assert len(np.flatnonzero(index.packets["flags"] & 1)) == 5


@pytest.mark.parametrize("engines", [1, 2, 7, 56])
@pytest.mark.parametrize("videos", [1, 5])
def test_engines_do_the_work_once_and_no_faster_than_they_can(engines, videos):
    index = index_of(SHORT)
    work = sum(piece.cost for piece in plan(index, all_of(index), engines, RATES).pieces) * videos
    longest = max(piece.cost for piece in plan(index, all_of(index), engines, RATES).pieces)
    done = seconds_until_done(index, all_of(index), engines, videos, RATES)
    assert len(done) == videos
    assert done == sorted(done)
    # Graham's bound: no list schedule is worse than the mean load and one longest piece
    assert max(work / engines, longest) - 1e-9 <= done[-1] <= work / engines + longest + 1e-9


def test_a_video_of_few_gops_ends_with_its_longest():
    index = index_of(Shape(seconds=10, gop=150))
    done = seconds_until_done(index, all_of(index), 56, 1, RATES)
    assert done == pytest.approx([max(piece.cost for piece in plan(index, all_of(index), 56, RATES).pieces)])
