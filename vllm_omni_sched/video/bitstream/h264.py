"""H.264 (ITU-T H.264): packets where decoding may begin, and pictures without references."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from vllm_omni_sched.video.bitstream.base import PacketFacts, ParameterSets, PictureOrder
from vllm_omni_sched.video.bitstream.bits import (
    UNIT_BYTES,
    Bits,
    EndOfBits,
    nals,
    sized_units,
    skip_scaling_list,
    unescaped,
)

_SLICE, _PARTITION_A, _IDR, _SEI, SPS, _PPS = 1, 2, 5, 6, 7, 8
_RECOVERY_POINT = 6
_X264 = re.compile(rb"x264 - core (\d+)")
_OWN_DIRECT_BEFORE, _OWN_444_BEFORE = 34, 151  # builds of x264: of temporal direct prediction, of CABAC with 4:4:4
_I_SLICE, _ALL_I = 2, 7
_WITH_CHROMA_FORMAT = {100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135}  # profiles, 7.3.2.1.1

_BY_LOW_BITS, _AS_DECODED = 0, 2
"""Values of pic_order_cnt_type. The third one, by a cycle in the parameters, is not supported: encoders do not use
it.
"""


class Sequence(NamedTuple):
    """The fields of a sequence's parameters that decide how slice headers are read."""

    separate_planes: bool
    frame_num_bits: int
    order_type: int
    order_bits: int  # number of low bits of a picture order count, if the type is `_BY_LOW_BITS`
    fields: bool  # pictures may be fields
    full_chroma: bool = False  # 4:4:4


class H264Reader:
    """Reads packets of H.264, in the format of MP4 and Matroska (``avcC``) or with start codes.

    A start is an IDR picture, or an I picture at a recovery point of zero frames (an open GOP). A recovery point some
    frames ahead, as with periodic intra refresh, is not a start: the frames until there would not be exact.

    Decoders imitate the builds of x264 that deviated from the standard. The message that identifies such a build,
    mostly in the first packet only, therefore counts as a parameter.
    """

    def __init__(self, extradata: bytes) -> None:
        self._sets = ParameterSets()
        self._order = PictureOrder()
        self._sequences: dict[int, Sequence] = {}  # by number of sps
        self._sps_of: dict[int, int] = {}  # pps: sps
        self._full_chroma = False  # 4:4:4
        self._length_bytes, units = parameter_sets(extradata)
        for nal in units:
            self._parameters(nal, self._sets.of_container)

    def read(self, data: bytes, key: bool) -> PacketFacts:
        exact_recovery = False
        self._sets.begin_packet()
        for nal in nals(data, self._length_bytes):
            kind = nal[0] & 31
            if kind in (_SLICE, _PARTITION_A, _IDR):
                alone = self._is_lone_field(data)
                start = kind == _IDR or (exact_recovery and self._all_intra(data))
                droppable = not nal[0] & 0x60 and not self._sets.needed_later
                display = self._display(nal)
                return PacketFacts(start and self._sets.complete and not alone, droppable, 0, alone, display)
            if kind == _SEI:
                message = unescaped(nal, 512)
                exact_recovery |= _is_exact_recovery_point(message[1:])
                if build := _X264.search(message):
                    own = 0 < int(build[1]) < (_OWN_444_BEFORE if self._full_chroma else _OWN_DIRECT_BEFORE)
                    if own:
                        self._sets.in_packet(kind, 0, message)
            elif kind in (SPS, _PPS):
                self._parameters(nal, self._sets.in_packet)
        return PacketFacts(irregular=True)  # no picture in it

    def _all_intra(self, data: bytes) -> bool:
        for nal in nals(data, self._length_bytes):
            if nal[0] & 31 == _SLICE:
                bits = Bits(unescaped(nal)[1:])
                bits.ue()  # first_mb_in_slice
                kind = bits.ue()
                if kind == _ALL_I:
                    return True
                if kind != _I_SLICE:
                    return False
        return True

    def _display(self, nal: bytes) -> int | None:
        """Return the rank of a picture from its first slice; for two fields, the first one decides."""
        if nal[0] & 31 == _IDR:
            self._order.begin()
        try:
            bits = Bits(unescaped(nal)[1:])
            bits.ue(), bits.ue()  # first_mb_in_slice, slice_type
            sequence = self._sequences.get(self._sps_of.get(bits.ue(), 0))
            if sequence is None:
                return None
            if sequence.order_type == _AS_DECODED:
                self._order.begin()
                return self._order.rank(0, 1, counts=True)
            if sequence.order_type != _BY_LOW_BITS:
                return None
            bits.read(2 * sequence.separate_planes + sequence.frame_num_bits)  # colour_plane_id, frame_num
            if sequence.fields and bits.flag():  # field_pic_flag
                bits.read(1)  # bottom_field_flag
            if nal[0] & 31 == _IDR:
                bits.ue()  # idr_pic_id
            low = bits.read(sequence.order_bits)
        except EndOfBits:
            return None
        return self._order.rank(low, sequence.order_bits, counts=bool(nal[0] & 0x60))

    def _is_lone_field(self, data: bytes) -> bool:
        if not any(sequence.fields for sequence in self._sequences.values()):
            return False
        parities = set()
        for nal in nals(data, self._length_bytes):
            if nal[0] & 31 in (_SLICE, _IDR):
                bits = Bits(unescaped(nal)[1:])
                bits.ue(), bits.ue()  # first_mb_in_slice, slice_type
                sequence = self._sequences.get(self._sps_of.get(bits.ue(), 0))
                if sequence is None or not sequence.fields:
                    return False
                bits.read(2 * sequence.separate_planes + sequence.frame_num_bits)  # colour_plane_id, frame_num
                if not bits.flag():  # field_pic_flag
                    return False
                parities.add(bits.flag())
        return len(parities) == 1

    def _parameters(self, nal: bytes, note: Callable[[int, int, bytes], None]) -> None:
        kind = nal[0] & 31
        if kind == SPS:
            number, sequence = read_sequence(nal)
            self._sequences[number] = sequence
            self._full_chroma |= sequence.full_chroma
            note(kind, number, nal)
        elif kind == _PPS:
            bits = Bits(unescaped(nal)[1:])
            number = bits.ue()
            self._sps_of[number] = bits.ue()
            note(kind, number, nal)


def read_sequence(sps: bytes) -> tuple[int, Sequence]:
    """Return the number and the fields of a sequence parameter set, a NAL unit (7.3.2.1.1).

    Raises:
        EndOfBits: it is truncated.
    """
    bits = Bits(unescaped(sps, UNIT_BYTES)[1:])
    profile = bits.read(8)
    bits.read(16)  # constraints, level
    number = bits.ue()
    full_chroma = separate_planes = False
    if profile in _WITH_CHROMA_FORMAT:
        full_chroma = bits.ue() == 3
        separate_planes = full_chroma and bits.flag()
        bits.ue(), bits.ue(), bits.read(1)  # bit depths, lossless bypass
        if bits.flag():
            for i in range(12 if full_chroma else 8):
                if bits.flag():
                    skip_scaling_list(bits, 16 if i < 6 else 64)
    frame_num_bits = bits.ue() + 4
    order, order_bits = bits.ue(), 0
    if order == _BY_LOW_BITS:
        order_bits = bits.ue() + 4
    elif order == 1:
        bits.read(1), bits.se(), bits.se()
        for _ in range(min(bits.ue(), 255)):
            bits.se()
    bits.ue(), bits.read(1), bits.ue(), bits.ue()  # reference frames, gaps, width, height
    fields = not bits.flag()  # frame_mbs_only_flag
    return number, Sequence(separate_planes, frame_num_bits, order, order_bits, fields, full_chroma)


def parameter_sets(extradata: bytes) -> tuple[int, list[bytes]]:
    """Return the size of the length before each NAL unit of a packet, and the parameter sets of a stream.

    Args:
        extradata: an ``AVCDecoderConfigurationRecord`` (ISO/IEC 14496-15), or units with start codes, for which the
            size is 0.

    Raises:
        EndOfBits, IndexError: the record is truncated.
    """
    if extradata[:1] != b"\1":
        return 0, list(nals(extradata, 0))
    units: list[bytes] = []
    at = 5
    for mask in (31, 255):  # sequence parameter sets, then picture parameter sets
        found, at = sized_units(extradata, at + 1, extradata[at] & mask)
        units += found
    return (extradata[4] & 3) + 1, units


def _is_exact_recovery_point(data: bytes) -> bool:
    at = 0
    while at + 2 <= len(data) and data[at:] != b"\x80":
        kind = size = 0
        try:
            while data[at] == 255:
                kind, at = kind + 255, at + 1
            kind, at = kind + data[at], at + 1
            while data[at] == 255:
                size, at = size + 255, at + 1
            size, at = size + data[at], at + 1
        except IndexError:
            return False
        if kind == _RECOVERY_POINT:
            try:
                bits = Bits(data[at : at + size])
                return bits.ue() == 0 and bits.flag() and not bits.flag()  # frames, exact match, broken link
            except EndOfBits:
                return False
        at += size
    return False
