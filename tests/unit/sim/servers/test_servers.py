"""What single servers take."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.servers import EncoderServer, QueueServer, SharedServer
from vllm_omni_sched.sim.video import VideoServer, frames_of, pieces_of, spans_of, stock_decoding, wanted_of
from vllm_omni_sched.sim.work import Clip, Item, Job, Request
from vllm_omni_sched.video.facts import PACKET, Order, PacketFlag, VideoIndex
from vllm_omni_sched.video.plan import Rates, plan
from vllm_omni_sched.video.pool.assignment import PieceAssigner


class Decoding:
    source = Source(SourceKind.ASSUMED, "of this test")
    piece_seconds = 0.001

    def __init__(self, frame_seconds=0.01):
        self.frame_seconds = frame_seconds

    def frames_seconds(self, clip, frames):
        return frames * self.frame_seconds


class Encoding:
    source = Source(SourceKind.ASSUMED, "of this test")

    def __init__(self):
        self.calls = []

    def encode_seconds(self, modality, embeds, items=1, share=1.0):
        self.calls.append((modality, embeds, items))
        return 1.0


def clip(seconds=10.0, wanted=4, gop=25):
    return Clip(seconds, 25.0, 640, 360, gop, wanted)


def job(number, *items):
    return Job(Request(number, 0.0, 1, 1, items), 0)


def ends(make, *jobs):
    sim, found = Simulator(), {}
    server = make(sim, lambda one: found.update({one.request.number: sim.now}))
    for one in jobs:
        server.submit(one)
    sim.run()
    return found, server


def test_places_work_beside_each_other():
    seconds = {0: 3.0, 1: 1.0, 2: 1.0}
    found, server = ends(
        lambda sim, done: QueueServer(sim, done, 2, lambda one, _: seconds[one.request.number], random.Random(0)),
        *map(job, range(3)),
    )
    assert found == {0: 3.0, 1: 1.0, 2: 2.0}
    assert server.busy_seconds() == {"serve": 5.0}


def test_a_place_is_free_when_a_job_is_taken_back():
    sim, done = Simulator(), {}
    server = QueueServer(sim, lambda one: done.update({one: sim.now}), 1, lambda *_: 4.0, random.Random(0))
    first, second = job(0), job(1)
    server.submit(first)
    server.submit(second)
    sim.at(1.0, server.abort, first)
    sim.run()
    assert done == {second: 5.0}
    assert server.busy_seconds() == {"serve": 5.0}


def test_shared_ones_slow_each_other_down():
    seconds = {0: 3.0, 1: 1.0, 2: 1.0}
    found, server = ends(
        lambda sim, done: SharedServer(sim, done, lambda one, _: seconds[one.request.number], random.Random(0)),
        *map(job, range(3)),
    )
    assert found == pytest.approx({1: 3.0, 2: 3.0, 0: 5.0})
    assert server.busy_seconds() == pytest.approx({"serve": 5.0})


def test_to_take_one_back_speeds_up_the_other():
    sim, done = Simulator(), []
    server = SharedServer(sim, lambda one: done.append(sim.now), lambda one, _: 2.0, random.Random(0))
    first, second = job(0), job(1)
    server.submit(first)
    server.submit(second)
    sim.at(2.0, server.abort, first)
    sim.run()
    assert done == [3.0]


def test_batches_are_of_one_modality_and_no_larger_than_may_be():
    costs = Encoding()
    picture, sound = Item("image", 100, 1), Item("audio", 7, 2)
    found, server = ends(
        lambda sim, done: EncoderServer(sim, done, costs, batch_items=2),
        job(0, picture),
        job(1, picture, picture),
        job(2, picture, sound),
        job(3),
    )
    assert costs.calls == [("image", 100, 1), ("image", 200, 2), ("image", 100, 1), ("audio", 7, 1)]
    assert found == {3: 0.0, 0: 1.0, 1: 2.0, 2: 4.0}
    assert server.busy_seconds() == {"encode": 4.0}


def test_only_groups_of_wanted_frames_are_decoded_up_to_the_last_wanted():
    one = clip(seconds=8.0, wanted=3, gop=50)  # 200 frames; wanted 0, 99, 199
    assert frames_of(one) == 200
    assert wanted_of(one) == [0, 99, 199]
    assert spans_of(one) == [(0, 0), (50, 99), (150, 199)]
    assert pieces_of(one, Decoding(), 2) == pytest.approx([0.501, 0.501, 0.011])


def test_neighbours_that_touch_are_joined_while_they_are_short():
    every = clip(seconds=4.0, wanted=100, gop=1)  # key frames only, all wanted
    found = pieces_of(every, Decoding(0.003), 1)
    assert 20 <= len(found) < 50
    assert max(found) <= 20 * 0.001 + 1e-9
    assert sum(found) == pytest.approx(100 * 0.003 + len(found) * 0.001)


@pytest.mark.parametrize("frame_seconds", [0.01, 0.001])
@pytest.mark.parametrize(("seconds", "wanted", "gop"), [(10.0, 4, 25), (60.0, 64, 12), (4.0, 100, 1), (1.0, 1, 250)])
def test_pieces_are_those_of_the_real_plan(seconds, wanted, gop, frame_seconds):
    one = clip(seconds, wanted, gop)
    index = index_of(frames_of(one), gop)
    rates = Rates(per_pixel=frame_seconds / (640 * 360), per_byte=0.0, per_piece=0.001)
    real = plan(index, wanted_of(one), 2, rates)
    assert pieces_of(one, Decoding(frame_seconds), 2) == pytest.approx([piece.cost for piece in real.pieces])


def index_of(frames, gop):
    """Return the index of a file of so many frames, the first of each group a key frame."""
    packets = np.zeros(frames, PACKET)
    packets["pts"] = np.arange(frames)
    packets["flags"][::gop] = PacketFlag.START
    return VideoIndex("h264", b"", 640, 360, 0, "", (1, 25), 0, 0.0, 0.0, packets, True, 0, Order.PTS)


def test_one_video_is_spread_over_all_decoders():
    one = job(0, Item("video", 1, 1, clip(seconds=10.0, wanted=250, gop=25)))
    alone, _ = ends(lambda sim, done: VideoServer(sim, done, Decoding(), 1), one)
    four, server = ends(lambda sim, done: VideoServer(sim, done, Decoding(), 4), one)
    assert alone[0] == pytest.approx(2.5, rel=0.01)
    assert four[0] < alone[0] / 3
    assert server.busy_seconds()["decode"] == pytest.approx(2.5, rel=0.01)
    assert server.share.__class__ is PieceAssigner


def test_idle_processors_are_lent_to_a_piece_that_cannot_be_cut():
    one = job(0, Item("video", 1, 1, clip(seconds=10.0, wanted=250, gop=250)))
    single, _ = ends(lambda sim, done: VideoServer(sim, done, Decoding(), 4), one)
    lent, _ = ends(lambda sim, done: VideoServer(sim, done, Decoding(), 4, threads=4, thread_gain=1.0), one)
    assert single[0] == pytest.approx(2.501)
    assert lent[0] == pytest.approx(2.501 / 4)


def test_stock_decodes_every_frame_with_all_threads_few_clips_at_once():
    videos = [job(number, Item("video", 1, number, clip(seconds=10.0, wanted=1))) for number in range(3)]
    # two have 8 cores each; the third has 16 threads for itself when both are done
    found, server = ends(lambda sim, done: stock_decoding(sim, done, Decoding(), 16, random.Random(0), 2), *videos)
    both, alone = 2.501 / (1 + 0.8 * 7), 2.501 / (1 + 0.8 * 15)
    assert found == pytest.approx({0: both, 1: both, 2: both + alone})
    assert server.busy_seconds()["decode"] == pytest.approx(16 * (both + alone))


def test_stock_has_no_more_threads_for_a_clip_than_ffmpeg_takes():
    one = job(0, Item("video", 1, 1, clip(seconds=10.0, wanted=1)))
    found, server = ends(lambda sim, done: stock_decoding(sim, done, Decoding(), 64, random.Random(0)), one)
    assert found[0] == pytest.approx(2.501 / (1 + 0.8 * 15))
    assert server.busy_seconds()["decode"] == pytest.approx(16 * found[0])


def test_stock_on_a_gpu_seeks_to_the_key_frames_before_wanted_frames():
    # frames 0 and 249 of 250, a key frame every 50: 1 and 50 are decoded
    videos = [job(number, Item("video", 1, number, clip(seconds=10.0, wanted=2, gop=50))) for number in range(3)]
    found, _ = ends(lambda sim, done: stock_decoding(sim, done, Decoding(), 2, random.Random(0), engines=True), *videos)
    assert found == pytest.approx({0: 0.512, 1: 0.512, 2: 1.024})
