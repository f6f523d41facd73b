"""Every decoder gives, of every clip, the frames that a plain decode of the whole file gives, bit for bit."""

from __future__ import annotations

import gc
import io
import mmap
from dataclasses import replace

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.clips import BROKEN, SOUND, clip
from tests.support.decoding import Video, index_of, ours, plain, video
from vllm_omni_sched.config.errors import DecoderError
from vllm_omni_sched.video import demux
from vllm_omni_sched.video.bitstream import PacketFacts, PacketReader
from vllm_omni_sched.video.bitstream.bits import Bits, unescaped
from vllm_omni_sched.video.decoders import pyav
from vllm_omni_sched.video.decoders.base import Decoder
from vllm_omni_sched.video.decoders.pyav import PyAvDecoder, output_size
from vllm_omni_sched.video.facts import Order, PacketFlag
from vllm_omni_sched.video.frame_order import shown_frames, shown_pts
from vllm_omni_sched.video.plan import plan
from vllm_omni_sched.video.repair import RepairReason, substitutes

DECODERS = [PyAvDecoder]
HEADLESS = {"h264_open_gop_headless", "hevc_open_gop_headless"}  # their first frames cannot be decoded by anyone


@pytest.fixture(params=DECODERS)
def decoder(request):
    made = request.param()
    yield made
    made.close()
    made.close()


def expected(name: str) -> dict[int, np.ndarray]:
    """Return the frames of a plain decode by number."""
    index = video(name).index
    if index.order is Order.SEQUENCE:
        return {n: picture for n, (_, picture) in enumerate(plain(name))}
    number = {pts: n for n, pts in enumerate(shown_pts(index).tolist())}
    return {number[pts]: picture for pts, picture in plain(name)}


def samples(frames: int) -> dict[str, list[int]]:
    return {
        "all": list(range(frames)),
        "first": [0],
        "ends": sorted({0, frames - 1}),
        "one in 7": list(range(3, frames, 7)) or [0],
        "two beside each other": [frames // 2, frames // 2 + 1][: max(1, frames - frames // 2)],
    }


def check(name: str, decoder: Decoder, threads: int) -> None:
    source, truth = video(name), expected(name)
    for what, numbers in samples(shown_frames(source.index)).items():
        outcome = ours(source, numbers, decoder=decoder, threads=threads)
        got = outcome.frames
        assert outcome.repair is None or name in BROKEN or name in HEADLESS, what
        assert sorted(got) == [n for n in numbers if n in truth], what
        differing = [n for n in got if not np.array_equal(got[n], truth[n])]
        assert not differing, what


@pytest.mark.parametrize("name", SOUND)
def test_sound_video(name: str, decoder: Decoder) -> None:
    check(name, decoder, threads=1)
    if name not in HEADLESS:
        assert len(expected(name)) == shown_frames(video(name).index)


@pytest.mark.parametrize("name", [name for name in SOUND if "edit" in name or "trimmed" in name])
def test_edits_show_what_a_plain_decoder_shows_in_that_order(name: str, decoder: Decoder) -> None:
    """Compare with FFmpeg, which hides, orders and counts frames, and with PyAV, which converts them."""
    with av.open(io.BytesIO(clip(name))) as file:
        truth = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    source = video(name)
    assert shown_frames(source.index) == len(truth)
    for numbers in (range(len(truth)), range(1, len(truth), 4)):
        got = ours(source, numbers, decoder=decoder).frames
        assert sorted(got) == list(numbers)
        # PyAV's conversion is not always bit-exact to ours; frames beside each other differ by far more
        assert all(np.abs(got[n].astype(int) - truth[n]).max() <= 3 for n in numbers)


@pytest.mark.parametrize("name", ["h264_one_gop", "h264_open_gop", "h264_raw", "hevc_open_gop", "av1", "vp9", "mpeg4"])
def test_with_threads(name: str, decoder: Decoder) -> None:
    check(name, decoder, threads=2)


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_video(name: str, decoder: Decoder) -> None:
    check(name, decoder, threads=1 + len(name) % 2)


@pytest.mark.parametrize("name", ["h264", "hevc", "mpeg4", "av1"])
def test_what_nobody_wants_or_needs_is_not_decoded(name: str, decoder: Decoder) -> None:
    source = video(name)
    numbers = list(range(5, shown_frames(source.index), 11))
    outcome = ours(source, numbers, decoder=decoder)
    assert len(outcome.frames) == len(numbers)
    planned = sum(len(piece.feed) for piece, _ in outcome.pieces)
    without_gaps = sum(max(piece.feed) - min(piece.feed) + 1 for piece, _ in outcome.pieces)
    assert outcome.decoded <= planned < without_gaps < shown_frames(source.index)
    height, width = source.index.height, source.index.width
    assert sum(result.bytes_written for _, result in outcome.pieces) == len(numbers) * height * width * 3


@given(st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_whatever_is_wanted(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["h264_open_gop", "h264_pyramid", "hevc_open_gop", "mpeg4", "av1", "vp9_hidden"]))
    numbers = sorted(data.draw(st.sets(st.integers(0, shown_frames(video(name).index) - 1), min_size=1)))
    threads, decoders = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 8))
    outcome = ours(video(name), numbers, threads=threads, decoders=decoders)
    assert sorted(outcome.frames) == numbers
    assert all(np.array_equal(outcome.frames[n], expected(name)[n]) for n in numbers)
    assert outcome.repair is None or threads > 1


def test_one_video_after_the_other(decoder: Decoder) -> None:
    for name in ("h264", "vp9", "h264_rotated", "h264"):
        assert np.array_equal(ours(video(name), [20], decoder=decoder).frames[20], expected(name)[20])


def test_closing_lets_go_of_the_memory(decoder: Decoder) -> None:
    source = video("h264_crop")
    packets, frames = mmap.mmap(-1, len(source.packets)), mmap.mmap(-1, 1 << 20)
    packets[:] = source.packets
    decoder.open(source.index, memoryview(packets), memoryview(frames))
    (piece,) = plan(source.index, [20]).pieces
    assert decoder.decode(piece).found == (0,)
    decoder.close()
    gc.collect()
    packets.close()  # raises while somebody looks at it
    frames.close()


def test_a_frame_that_is_not_there_is_no_error(decoder: Decoder) -> None:
    source = video("h264")
    cut = replace(source.index, packets=source.index.packets[:20])
    numbers = [0, 15, 30]
    assert plan(cut, numbers).absent == (2,)
    assert sorted(ours(Video(cut, source.packets), numbers, decoder=decoder).frames) == [0, 15]


def without_reordering_hint(extradata: bytes) -> bytes:
    """H.264 parameters whose SPS says nothing of how many frames are held back, as with many hardware encoders."""
    assert extradata[5:6] == b"\xe1"  # one SPS
    size = int.from_bytes(extradata[6:8], "big")
    sps = extradata[8 : 8 + size]
    payload = unescaped(sps, size)[1:]
    total = len(payload) * 8
    bits = Bits(payload)
    bits.read(24), bits.ue()
    bits.ue(), bits.ue(), bits.ue(), bits.read(2)  # of the high profiles: chroma, depths, no scaling matrices
    assert [bits.ue() for _ in range(2)][1] == 0  # order count by its low bits
    bits.ue(), bits.ue(), bits.read(1), bits.ue(), bits.ue(), bits.read(2)
    if bits.flag():
        bits.ue(), bits.ue(), bits.ue(), bits.ue()
    read = total - bits.left
    text = format(int.from_bytes(payload, "big"), f"0{total}b")[:read] + "01"  # no VUI; the end
    text += "0" * (-len(text) % 8)
    new = sps[:1] + int(text, 2).to_bytes(len(text) // 8, "big")
    return extradata[:6] + len(new).to_bytes(2, "big") + new + extradata[8 + size :]


@pytest.mark.parametrize("name", ["h264_pyramid", "h264_open_gop"])
def test_frames_are_held_back_long_enough_without_a_hint(
    name: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = video(name)
    numbers = list(range(shown_frames(source.index)))
    silent = Video(replace(source.index, extradata=without_reordering_hint(source.index.extradata)), source.packets)
    got = ours(silent, numbers, decoder=decoder)
    assert sorted(got.frames) == numbers
    assert got.repair is None
    assert all(np.array_equal(got.frames[n], expected(name)[n]) for n in numbers)
    monkeypatch.setattr(pyav, "reorder_depth", lambda packets: 0)
    hasty = Video(replace(silent.index, reorder=0), source.packets)
    assert ours(hasty, numbers, decoder=decoder).repair is not None


def test_a_codec_that_it_does_not_know(decoder: Decoder) -> None:
    source = video("h264")
    with pytest.raises(DecoderError, match="codec"):
        decoder.open(replace(source.index, codec="nonesuch"), memoryview(source.packets), memoryview(b""))


def test_decode_without_open(decoder: Decoder) -> None:
    (piece,) = plan(video("h264_one_gop").index, [3]).pieces
    with pytest.raises(DecoderError, match="open"):
        decoder.decode(piece)


def test_a_video_that_is_known_to_be_in_sequence_ends_early(decoder: Decoder) -> None:
    source = video("h264_raw")
    assert source.index.order is Order.SEQUENCE
    assert ours(source, [4], decoder=decoder).decoded < 12


class Unsaid:
    """A reader of packets that does not say when their frames are shown."""

    def __init__(self, reader: PacketReader) -> None:
        self._reader = reader

    def read(self, data: bytes, key: bool) -> PacketFacts:
        return self._reader.read(data, key)._replace(display=None)


@pytest.mark.parametrize(
    "name", ["mpeg4_mixed_up", "h264_mixed_up", "mpeg4_decoding_times", "h264_decoding_times", "hevc_decoding_times"]
)
def test_frames_that_come_out_in_another_order_than_their_pts_are_counted_anew(
    name: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader_for = demux.reader_for
    monkeypatch.setattr(demux, "reader_for", lambda *codec: Unsaid(reader_for(*codec)))
    source, truth = index_of(clip(name)), [picture for _, picture in plain(name)]
    assert source.index.order is Order.PTS
    differing = 0
    for numbers in ([20], range(3, 48, 5), range(48)):
        outcome = ours(source, list(numbers), decoder=decoder)
        assert outcome.repair is None or outcome.repair.reason is RepairReason.DISORDER
        differing += outcome.repair is not None
        assert sorted(outcome.frames) == list(numbers)
        assert all(np.array_equal(outcome.frames[n], truth[n]) for n in numbers)
    assert differing


def test_of_several_frames_for_one_slot_the_first_is_taken(decoder: Decoder) -> None:
    source, truth = video("mpeg4_avi"), expected("mpeg4_avi")
    assert source.index.order is Order.PTS
    for index in (source.index, replace(source.index, order=Order.SEQUENCE)):
        piece = substitutes(index, {0: range(5, 9), 1: range(20, 99), 2: range(90, 99)}, 7, frames_decoded=48)
        assert piece is not None
        assert {one.slot for one in piece.wanted} == {0, 1}
        pictures = np.zeros((3, *output_size(index), 3), np.uint8)
        decoder.open(index, memoryview(source.packets), memoryview(pictures).cast("B"))
        result = decoder.decode(piece)
        assert (result.found, result.frames) == ((0, 1), (5, 20))
        assert result.decoded < 30  # it ends with the last that was needed
        assert np.array_equal(pictures[0], truth[5])
        assert np.array_equal(pictures[1], truth[20])
    assert substitutes(index, {0: range(48, 60)}, 7, frames_decoded=48) is None


def test_hidden_frames_are_not_counted(decoder: Decoder) -> None:
    source = video("h264_trimmed")
    assert (source.index.packets["flags"] & PacketFlag.HIDDEN).any()
    in_sequence = Video(replace(source.index, order=Order.SEQUENCE), source.packets)
    assert np.array_equal(ours(in_sequence, [3], decoder=decoder).frames[3], expected("h264_trimmed")[3])


def test_damaged_times_do_not_change_how_many_frames_are_held_back(decoder: Decoder) -> None:
    index = video("h264_times_damaged").index
    assert index.order is Order.SEQUENCE
    assert pyav.reorder_depth(index.packets) > index.reorder > 0


def test_in_sequence_as_many_frames_are_held_back_as_the_container_says(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that is too few a plain decoder drops frames, and counts on without them."""
    source = video("h264_pyramid")
    silent = without_reordering_hint(source.index.extradata)
    in_sequence = Video(replace(source.index, extradata=silent, reorder=0, order=Order.SEQUENCE), source.packets)
    got = ours(in_sequence, range(10), decoder=decoder).frames
    assert not all(np.array_equal(got[n], expected("h264_pyramid")[n]) for n in got)
    monkeypatch.setattr(pyav, "reorder_depth", lambda packets: 0)
    by_container = ours(in_sequence, range(10), decoder=decoder).frames
    assert all(np.array_equal(got[n], by_container[n]) for n in range(10))
