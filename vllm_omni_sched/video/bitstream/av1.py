"""AV1 (its bitstream specification, 1.0.0 with errata 1): key frames that are shown, and frames without references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from vllm_omni_sched.video.bitstream.base import PacketFacts, ParameterSets
from vllm_omni_sched.video.bitstream.bits import UNIT_BYTES, Bits, EndOfBits

_SEQUENCE_HEADER, _FRAME_HEADER, _FRAME = 1, 3, 6
_KEY, _INTRA_ONLY, _SWITCH = 0, 2, 3
_CHOSEN_BY_FRAME = 2  # SELECT_SCREEN_CONTENT_TOOLS, SELECT_INTEGER_MV


class Av1Reader:
    """Reads temporal units of AV1.

    A start is a unit that begins with a key frame shown at once. A key frame that is shown later, by reference, is
    not a start: frames before it in display order come after it in the file. A unit of one frame that is kept in no
    reference slot is droppable: everything that a frame passes on to others, such as probabilities, goes through slots.
    """

    def __init__(self, extradata: bytes) -> None:
        self._sets = ParameterSets()
        self._sequence: _Sequence | None = None
        for kind, content in obus(extradata[4:]):  # behind the head of av1C
            if kind == _SEQUENCE_HEADER:
                self._learn(content, self._sets.of_container)

    def read(self, data: bytes, key: bool) -> PacketFacts:
        self._sets.begin_packet()
        start = droppable = False
        frames = shown = 0
        for kind, content in obus(data):
            if kind == _SEQUENCE_HEADER:
                self._learn(content, self._sets.in_packet)
            elif kind in (_FRAME, _FRAME_HEADER):
                header = _frame_header(Bits(content[:32]), self._sequence)
                if frames == 0:
                    start = header.key and header.shown and self._sets.complete
                    droppable = not header.kept and not self._sets.needed_later
                frames += 1
                shown += header.shown
        return PacketFacts(start, droppable and frames == 1, 0, shown != 1, display=0)

    def _learn(self, content: bytes, note: Callable[[int, int, bytes], None]) -> None:
        try:
            self._sequence = _sequence_header(Bits(content))
        except EndOfBits:
            self._sequence = None
        note(_SEQUENCE_HEADER, 0, content)


class _Sequence(NamedTuple):
    """The fields of a sequence header that decide how frame headers are read."""

    reduced: bool
    timed: bool  # frames carry times for the decoder model, which are not read here
    screen_content_tools: int
    integer_mv: int
    frame_id_bits: int
    order_hint_bits: int


class _Frame(NamedTuple):
    key: bool
    shown: bool
    kept: bool = True  # in some reference slot, or unknown


def _sequence_header(bits: Bits) -> _Sequence:
    bits.read(4)  # profile, still picture
    if bits.flag():  # reduced_still_picture_header
        return _Sequence(True, False, 0, 0, 0, 0)
    timed = False
    if bits.flag():  # timing_info_present_flag
        bits.read(64)
        if bits.flag():
            bits.ue()  # num_ticks_per_picture_minus_1
        timed = bits.flag()
    if timed:
        return _Sequence(False, True, 0, 0, 0, 0)
    delays = bits.flag()
    for _ in range(bits.read(5) + 1):  # operating points
        bits.read(12)
        if bits.read(5) > 7:
            bits.read(1)
        if delays and bits.flag():
            bits.read(4)
    width_bits, height_bits = bits.read(4) + 1, bits.read(4) + 1
    bits.read(width_bits + height_bits)
    frame_id_bits = bits.read(4) + 2 + bits.read(3) + 1 if bits.flag() else 0
    bits.read(7)  # superblocks, filters, compound and motion tools
    order_hints = bits.flag()
    if order_hints:
        bits.read(2)
    tools = _CHOSEN_BY_FRAME if bits.flag() else bits.read(1)
    integer_mv = _CHOSEN_BY_FRAME if tools == 0 or bits.flag() else bits.read(1)
    return _Sequence(False, False, tools, integer_mv, frame_id_bits, bits.read(3) + 1 if order_hints else 0)


def _frame_header(bits: Bits, sequence: _Sequence | None) -> _Frame:
    if sequence is not None and sequence.reduced:
        return _Frame(True, True)
    if bits.flag():  # show_existing_frame
        return _Frame(False, True)
    kind, shown = bits.read(2), bits.flag()
    if sequence is None or sequence.timed or not shown or kind in (_KEY, _SWITCH):
        return _Frame(kind == _KEY, shown)
    resilient = bits.flag()
    bits.read(1)  # disable_cdf_update
    tools = bits.read(1) if sequence.screen_content_tools == _CHOSEN_BY_FRAME else sequence.screen_content_tools
    if tools and sequence.integer_mv == _CHOSEN_BY_FRAME:
        bits.read(1)
    bits.read(sequence.frame_id_bits + 1 + sequence.order_hint_bits)  # and frame_size_override_flag
    if kind != _INTRA_ONLY and not resilient:
        bits.read(3)  # primary_ref_frame
    return _Frame(False, True, kept=bits.read(8) != 0)


def obus(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield open bitstream units: type, and at most the first `UNIT_BYTES` of the content."""
    at = 0
    while at < len(data):
        head = data[at]
        at += 2 if head & 4 else 1
        if head & 2:  # has a size
            size = shift = 0
            while True:
                if at >= len(data) or shift > 28:
                    raise EndOfBits
                byte = data[at]
                at += 1
                size |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
        else:
            size = len(data) - at
        yield head >> 3 & 15, data[at : at + min(size, UNIT_BYTES)]
        at += size
