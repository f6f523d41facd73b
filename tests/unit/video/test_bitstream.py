"""What headers of packets say, packet by packet; headers written by hand where no encoder here writes them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.decoding import video
from vllm_omni_sched.video.bitstream import reader_for
from vllm_omni_sched.video.bitstream.base import ParameterSets
from vllm_omni_sched.video.bitstream.bits import Bits, EndOfBits, nals, unescaped
from vllm_omni_sched.video.facts import PacketFlag

CODECS = ("h264", "hevc", "av1", "mpeg4", "vp8", "vp9", "mjpeg")


class Writer:
    """Writes what `Bits` reads."""

    def __init__(self) -> None:
        self.text = ""

    def bits(self, value: int, count: int) -> Writer:
        self.text += format(value, f"0{count}b") if count else ""
        return self

    def ue(self, *values: int) -> Writer:
        for value in values:
            self.bits(value + 1, 2 * (value + 1).bit_length() - 1)
        return self

    def nal(self, head: int) -> bytes:
        text = self.text + "1"
        text += "0" * (-len(text) % 8)
        return b"\0\0\1" + bytes([head]) + int(text, 2).to_bytes(len(text) // 8, "big")


SPS_WITH_FIELDS = Writer().bits(77, 8).bits(40, 16).ue(0, 0, 2, 1).bits(0, 1).ue(9, 4).bits(0, 1).nal(0x67)
PPS = Writer().ue(0, 0).nal(0x68)


def h264_slice(kind: int, *, head: int = 0x61, field: str | None = None) -> bytes:
    """Return a slice of a stream of `SPS_WITH_FIELDS`."""
    writer = Writer().ue(0, kind, 0).bits(3, 4)
    if field is None:
        writer.bits(0, 1)
    else:
        writer.bits(2 | (field == "bottom"), 2)
    return writer.nal(head)


def recovery_point(frames: int, exact: bool = True, broken: bool = False) -> bytes:
    content = Writer().ue(frames).bits(exact, 1).bits(broken, 1).bits(0, 2)
    data = content.nal(0)[4:]
    return b"\0\0\1\6" + bytes([1, 1, 0, 6, len(data)]) + data + b"\x80"


def h264() -> object:
    return reader_for("h264", SPS_WITH_FIELDS + PPS)


@pytest.mark.parametrize(
    ("packet", "start", "droppable", "irregular"),
    [
        (h264_slice(7, head=0x65), True, False, False),
        (h264_slice(7), False, False, False),
        (h264_slice(5), False, False, False),
        (h264_slice(6, head=0x01), False, True, False),
        (recovery_point(0) + h264_slice(7), True, False, False),
        (recovery_point(0) + h264_slice(2) + h264_slice(2), True, False, False),
        (recovery_point(0) + h264_slice(2) + h264_slice(0), False, False, False),  # some slice is predicted
        (recovery_point(0) + h264_slice(5), False, False, False),
        (recovery_point(12) + h264_slice(7), False, False, False),  # periodic intra refresh
        (recovery_point(0, exact=False) + h264_slice(7), False, False, False),
        (recovery_point(0, broken=True) + h264_slice(7), False, False, False),
        (h264_slice(7, head=0x65, field="top") + h264_slice(5, head=0x65, field="bottom"), True, False, False),
        (h264_slice(7, head=0x65, field="top"), False, False, True),
        (h264_slice(6, head=0x01, field="bottom"), False, True, True),
        (b"\0\0\1\x09\x10", False, False, True),  # no picture in it
    ],
)
def test_h264_packets(packet: bytes, start: bool, droppable: bool, irregular: bool) -> None:
    facts = h264().read(packet, True)
    assert (facts.start, facts.irregular) == (start, irregular)
    assert facts.droppable == droppable


def test_h264_parameters_that_change_must_come_again_at_a_start() -> None:
    reader, key = h264(), h264_slice(7, head=0x65)
    other = Writer().ue(0, 0).bits(1, 1).nal(0x68)
    assert reader.read(key, True).start
    assert reader.read(PPS + key, True).start
    assert not reader.read(other + h264_slice(5, head=0x01), False).droppable  # others may need what it carries
    assert not reader.read(key, True).start
    assert reader.read(other + key, True).start
    assert not reader.read(key, True).start


@pytest.mark.parametrize(
    ("kind", "layer", "start", "droppable"),
    [(0, 0, False, True), (1, 0, False, False), (2, 1, False, True), (8, 0, False, True), (9, 0, False, False)]
    + [(kind, 0, True, False) for kind in range(16, 22)],
)
def test_hevc_packets(kind: int, layer: int, start: bool, droppable: bool) -> None:
    facts = reader_for("hevc", b"").read(b"\0\0\1" + bytes([kind << 1, layer + 1, 0x80]), True)
    assert facts[:4] == (start, droppable, layer, False)


def test_hevc_pictures_of_another_view_are_none() -> None:
    assert reader_for("hevc", b"").read(b"\0\0\1" + bytes([19 << 1, 1 << 3 | 1, 0x80]), True).irregular


@pytest.mark.parametrize(
    ("head", "start", "irregular"),
    [(0b10000010, True, False), (0b10000110, False, False), (0b10000000, False, True), (0b10001000, False, False)],
)
def test_vp9_frames(head: int, start: bool, irregular: bool) -> None:
    facts = reader_for("vp9", b"").read(bytes([head, 0]), True)
    assert (facts.start, facts.droppable, facts.irregular) == (start, False, irregular)


def test_vp9_superframe_with_a_hidden_frame() -> None:
    hidden, shown = bytes([0b10000100, 1]), bytes([0b10000110, 1, 1])
    index = bytes([0b11000001, len(hidden), len(shown), 0b11000001])
    assert not reader_for("vp9", b"").read(hidden + shown + index, False).irregular
    assert reader_for("vp9", b"").read(shown + shown + bytes([0xC1, 3, 3, 0xC1]), False).irregular


def av1_unit(*frames: int) -> bytes:
    """Return a temporal unit of frame headers, given by their first bytes."""
    return b"\x12\0" + b"".join(bytes([0x1A, 2, head, 0]) for head in frames)


@pytest.mark.parametrize(
    ("unit", "start", "irregular"),
    [
        (av1_unit(0b00010000), True, False),
        (av1_unit(0b00000000, 0b00110000), False, False),  # a key frame that is shown later
        (av1_unit(0b10000000), False, False),
        (av1_unit(0b00110000), False, False),
        (av1_unit(0b00010000, 0b00110000), True, True),
        (av1_unit(0b00100000), False, True),
    ],
)
def test_av1_units(unit: bytes, start: bool, irregular: bool) -> None:
    facts = reader_for("av1", b"").read(unit, True)
    assert (facts.start, facts.irregular) == (start, irregular)


AV1_SEQUENCE = Writer().bits(0, 4).bits(0, 3).bits(0, 5 + 12 + 5).bits(0x77, 8).bits(0, 16).bits(0, 1 + 7)
AV1_SEQUENCE.bits(0b100, 3).bits(0b0, 1).bits(0, 1).bits(0b110, 3)  # order hints of 7 bits, no tools by frame


@pytest.mark.parametrize(
    ("kept", "resilient", "droppable"), [(0, False, True), (4, False, False), (0, True, True), (1, True, False)]
)
def test_av1_frames_that_are_in_no_slot(kept: int, resilient: bool, droppable: bool) -> None:
    sequence = AV1_SEQUENCE.nal(0)[4:]
    frame = Writer().bits(0b0011, 4).bits(resilient, 1).bits(0, 1).bits(0, 1 + 7)
    frame.bits(0, 0 if resilient else 3).bits(kept, 8)
    content = frame.nal(0)[4:]
    reader = reader_for("av1", bytes(4) + bytes([0x0A, len(sequence)]) + sequence)
    facts = reader.read(bytes([0x32, len(content)]) + content, False)
    assert (facts.droppable, facts.irregular) == (droppable, False)


@pytest.mark.parametrize(
    ("packet", "start", "droppable", "frames"),
    [
        (b"\0\0\1\xb6\x10" + b"x" * 20, True, False, 1),
        (b"\0\0\1\xb6\x50" + b"x" * 20, False, False, 1),
        (b"\0\0\1\xb6\x90" + b"x" * 20, False, True, 1),
        (b"\0\0\1\xb6\x50\x60", False, False, 1),  # a short one
        (b"\0\0\1\xb6\x50\x40" + b"x" * 20, False, False, 0),  # not coded
        (b"\0\0\1\xb6\x70\x20", False, False, 0),  # not coded, a second later
        (b"\0\0\1\xb6\x50", False, False, 0),
        (b"\0\0\1\xb6\x50" + b"x" * 20 + b"\0\0\1\xb6\x90" + b"x" * 20, False, False, 2),
        (b"\0\0\1\xb3", False, False, 0),
    ],
)
def test_mpeg4_packets(packet: bytes, start: bool, droppable: bool, frames: int) -> None:
    layer = Writer().bits(0, 1).bits(1, 8).bits(0, 1).bits(1, 4).bits(0, 1).bits(0, 2).bits(1, 1).bits(30, 16).nal(0x20)
    facts = reader_for("mpeg4", layer).read(packet, True)
    assert (*facts[:4], facts.frames) == (start, droppable, 0, frames != 1, frames)


def test_mpeg4_layers_with_all_that_may_be_in_front_of_the_rate() -> None:
    layer = Writer().bits(0, 1).bits(1, 8).bits(1, 1).bits(0, 7).bits(15, 4).bits(0, 16)
    layer.bits(1, 1).bits(0, 3).bits(1, 1).bits(0, 79).bits(0, 2).bits(1, 1).bits(1000, 16)
    reader = reader_for("mpeg4", layer.nal(0x20))
    assert reader.read(b"\0\0\1\xb6\x50\x03", True).frames == 1  # 10 bits of time
    assert reader.read(b"\0\0\1\xb6\x50\x02", True).frames == 0


def test_a_codec_that_we_do_not_know() -> None:
    assert reader_for("theora", b"") is None


@pytest.mark.parametrize("codec", CODECS)
def test_noise_is_read_or_refused(codec: str) -> None:
    rng = np.random.default_rng(1)
    head = {"h264": b"\0\0\1", "hevc": b"\0\0\1", "mpeg4": b"\0\0\1\xb6"}.get(codec, b"")
    refused = 0
    for _ in range(400):
        noise = head + rng.integers(0, 256, int(rng.integers(1, 60)), np.uint8).tobytes()
        try:
            reader = reader_for(codec, noise if rng.random() < 0.2 else b"")
            reader.read(noise, True)
        except (EndOfBits, IndexError):
            refused += 1
    assert refused < 400


@pytest.mark.parametrize("name", ["h264", "h264_ts", "hevc", "mpeg4", "vp9", "av1"])
def test_starts_are_among_what_the_encoder_was_told(name: str) -> None:
    packets = video(name).index.packets
    starts = np.flatnonzero(packets["flags"] & PacketFlag.START)
    gop = {"h264_ts": 20, "av1": 10}.get(name, 12)
    first = np.sort(packets["pts"])[::gop]
    assert set(packets["pts"][starts].tolist()) >= set(first.tolist()[:1])
    assert len(packets) // gop <= len(starts) <= len(packets) // gop + 2


def test_numbers() -> None:
    data = Writer().ue(0, 1, 2, 7, 300).bits(5, 3).nal(0)[4:]
    bits = Bits(data)
    assert [bits.ue() for _ in range(5)] == [0, 1, 2, 7, 300]
    assert bits.read(3) == 5
    assert [Bits(Writer().ue(n).nal(0)[4:]).se() for n in range(5)] == [0, 1, -1, 2, -2]
    with pytest.raises(EndOfBits):
        Bits(b"\0").ue()


def test_units() -> None:
    assert list(nals(b"\0\0\0\2ab\0\0\0\1c", 4)) == [b"ab", b"c"]
    assert list(nals(b"\0\0\0\1ab\0\0\1c", 0)) == [b"ab", b"c"]
    assert list(nals(b"", 4)) == []
    assert unescaped(b"a\0\0\3\1b") == b"a\0\0\1b"


def test_parameter_sets_of_the_container_need_not_come_again() -> None:
    sets = ParameterSets()
    sets.of_container(7, 0, b"a\0")
    sets.begin_packet()
    sets.in_packet(7, 0, b"a")
    assert not sets.needed_later
    sets.begin_packet()
    assert sets.complete


def test_jpeg_tables_that_are_left_out() -> None:
    tables, huffman, scan = b"\xff\xdb\0\3\0", b"\xff\xc4\0\3\0", b"\xff\xda" + b"x" * 9
    reader = reader_for("mjpeg", b"")
    assert reader.read(tables + scan, True)[:4] == (True, True, 0, False)  # the standard's Huffman tables
    assert reader.read(scan + tables, True)[:4] == (False, False, 0, True)
    assert reader.read(tables + huffman + scan, True).start
    assert reader.read(tables + scan, True).irregular


def test_mpeg4_an_encoder_that_is_told_once() -> None:
    picture = b"\0\0\1\xb6\x10" + b"x" * 20
    encoder = b"\0\0\1\xb2XviD0050"
    reader = reader_for("mpeg4", b"")
    assert reader.read(b"\0\0\1\xb2some text" + picture, True).start
    assert reader.read(picture, True).start  # such text changes nothing
    assert reader.read(encoder + picture, True).start
    assert not reader.read(picture, True).start
    assert reader.read(encoder + picture, True).start
    of_container = reader_for("mpeg4", encoder)
    assert of_container.read(encoder + picture, True).start
    assert of_container.read(picture, True).start


@pytest.mark.parametrize(
    ("build", "chroma", "start"), [(33, 1, False), (148, 1, True), (148, 3, False), (151, 3, True), (165, 1, True)]
)
def test_h264_builds_of_x264_that_did_otherwise(build: int, chroma: int, start: bool) -> None:
    writer = Writer().bits(244, 8).bits(40, 16).ue(0, chroma)
    if chroma == 3:
        writer.bits(0, 1)
    sps = writer.ue(0, 0).bits(0, 2).ue(0, 2, 1).bits(0, 1).ue(9, 4).bits(1, 1).nal(0x67)
    text = b"u" * 16 + b"x264 - core %d" % build
    message = b"\0\0\1\6\5" + bytes([len(text)]) + text + b"\x80"
    picture = Writer().ue(0, 7, 0).bits(3, 4).nal(0x65)
    reader = reader_for("h264", sps + PPS)
    assert reader.read(message + picture, True).start
    assert reader.read(picture, True).start is start


@pytest.mark.parametrize("kind", [16, 17, 18])
def test_hevc_broken_links_are_irregular_but_the_first(kind: int) -> None:
    picture = b"\0\0\1" + bytes([kind << 1, 1, 0x80])
    reader = reader_for("hevc", b"")
    assert [reader.read(picture, True).irregular for _ in range(2)] == [False, True]


@pytest.mark.parametrize("kind", [36, 37])
def test_hevc_what_comes_behind_an_end_is_irregular(kind: int) -> None:
    picture, end = b"\0\0\1" + bytes([21 << 1, 1, 0x80]), b"\0\0\1" + bytes([kind << 1, 1])
    reader = reader_for("hevc", b"")
    packets = [picture, picture + picture + end, picture, picture, end + picture, picture + end]
    assert [reader.read(packet, True).irregular for packet in packets] == [False, False, True, False, True, False]
