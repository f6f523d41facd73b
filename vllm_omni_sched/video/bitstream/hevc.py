"""HEVC (ITU-T H.265): packets where decoding may begin, and pictures without references."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_omni_sched.video.bitstream.base import PacketFacts, ParameterSets, PictureOrder
from vllm_omni_sched.video.bitstream.bits import UNIT_BYTES, Bits, EndOfBits, nals, sized_units, unescaped

_FIRST_IRAP, _LAST_IRAP, _FIRST_NON_VCL = 16, 21, 32
_VPS, _SPS, _PPS = 32, 33, 34
_LAST_BROKEN_LINK = 18
_ENDS = {36, 37}  # of a sequence, of the bitstream
_LAST_SUB_LAYER_NON_REFERENCE = 14
_LEADING = range(6, 10)
_IDR, _LAST_RESERVED_IRAP = (19, 20), 23
_PROFILE_BITS, _LEVEL_BITS = 88, 8


class _Sequence(NamedTuple):
    """The fields of a sequence's parameters that decide how slice headers are read."""

    separate_planes: bool
    order_bits: int  # number of low bits of a picture order count


class _Picture(NamedTuple):
    """The fields of a picture's parameters that decide how slice headers are read."""

    sequence: int
    extra_bits: int
    may_be_hidden: bool


class HevcReader:
    """Reads packets of HEVC, in the format of MP4 and Matroska (``hvcC``) or with start codes.

    A start is any random access picture. The leading pictures that cannot be decoded when decoding begins at it are
    shown before it, and so belong to the previous start. Sub-layer non-reference pictures are droppable.

    Leading pictures behind a broken link, or behind the end of a sequence, are never shown, whatever was decoded
    before: such a start is irregular. So is a picture that must not be shown.
    """

    def __init__(self, extradata: bytes) -> None:
        self._sets = ParameterSets()
        self._begun = self._ended = False
        self._order = PictureOrder()
        self._sequences: dict[int, _Sequence] = {}
        self._pictures: dict[int, _Picture] = {}
        self._length_bytes, units = parameter_sets(extradata)
        for nal in units:
            if len(nal) > 2:
                self._parameters(nal, self._sets.of_container)

    def read(self, data: bytes, key: bool) -> PacketFacts:
        facts = None
        self._sets.begin_packet()
        for nal in nals(data, self._length_bytes):
            if nal[0] >> 1 in _ENDS and not nal[0] & 1:
                self._ended = True
            if facts or len(nal) < 3 or nal[0] & 1 or nal[1] & 0xF8:  # a unit of another layer, as in multi-view video
                continue
            kind = nal[0] >> 1
            if kind < _FIRST_NON_VCL:
                start = _FIRST_IRAP <= kind <= _LAST_IRAP and self._sets.complete
                droppable = kind <= _LAST_SUB_LAYER_NON_REFERENCE and kind % 2 == 0 and not self._sets.needed_later
                cut = self._begun and (self._ended or _FIRST_IRAP <= kind <= _LAST_BROKEN_LINK)
                if _FIRST_IRAP <= kind <= _LAST_RESERVED_IRAP and (cut or kind in _IDR or not self._begun):
                    self._order.begin()
                self._begun, self._ended = True, False
                shown, display = self._display(nal)
                facts = PacketFacts(start, droppable, (nal[1] & 7) - 1, cut or not shown, display)
            else:
                self._parameters(nal, self._sets.in_packet)
        return facts or PacketFacts(irregular=True)

    def _display(self, nal: bytes) -> tuple[bool, int | None]:
        """Return whether a picture is shown, from its first slice, and its rank."""
        kind = nal[0] >> 1
        try:
            bits = Bits(unescaped(nal)[2:])
            if not bits.flag():  # first_slice_segment_in_pic_flag
                return True, None
            if _FIRST_IRAP <= kind <= _LAST_RESERVED_IRAP:
                bits.read(1)  # no_output_of_prior_pics_flag
            picture = self._pictures.get(bits.ue())
            sequence = self._sequences.get(picture.sequence) if picture is not None else None
            if picture is None or sequence is None:
                return True, None
            bits.read(picture.extra_bits)
            bits.ue()  # slice_type
            if picture.may_be_hidden and not bits.flag():  # pic_output_flag
                return False, None
            bits.read(2 * sequence.separate_planes)  # colour_plane_id
            low = 0 if kind in _IDR else bits.read(sequence.order_bits)
        except EndOfBits:
            return True, None
        layer = (nal[1] & 7) - 1
        reference = kind > _LAST_SUB_LAYER_NON_REFERENCE or kind % 2 == 1
        counts = layer == 0 and reference and kind not in _LEADING
        return True, self._order.rank(low, sequence.order_bits, counts=counts)

    def _parameters(self, nal: bytes, note: Callable[[int, int, bytes], None]) -> None:
        kind = nal[0] >> 1
        if kind == _VPS:
            note(kind, nal[2] >> 4, nal)
        elif kind == _SPS:
            self._read_sps(nal)
            note(kind, 0, nal)  # its number comes after a long profile; ignoring it only costs starts if sets alternate
        elif kind == _PPS:
            bits = Bits(unescaped(nal)[2:])
            number = bits.ue()
            note(kind, number, nal)
            sequence = bits.ue()
            bits.read(1)  # dependent_slice_segments_enabled_flag
            hidden = bits.flag()
            self._pictures[number] = _Picture(sequence, bits.read(3), hidden)

    def _read_sps(self, nal: bytes) -> None:
        bits = Bits(unescaped(nal, UNIT_BYTES)[2:])
        try:
            bits.read(4)
            layers = bits.read(3)  # minus one
            bits.read(1 + _PROFILE_BITS + _LEVEL_BITS)
            if layers:
                present = [(bits.flag(), bits.flag()) for _ in range(8)][:layers]
                for profile, level in present:
                    bits.read(_PROFILE_BITS * profile + _LEVEL_BITS * level)
            number = bits.ue()
            separate_planes = bits.ue() == 3 and bits.flag()
            bits.ue(), bits.ue()  # width, height
            if bits.flag():
                bits.ue(), bits.ue(), bits.ue(), bits.ue()  # conformance window
            bits.ue(), bits.ue()  # bit depths
            self._sequences[number] = _Sequence(separate_planes, bits.ue() + 4)
        except EndOfBits:
            return


def parameter_sets(extradata: bytes) -> tuple[int, list[bytes]]:
    """Return the size of the length before each NAL unit of a packet, and the parameter sets of a stream.

    Args:
        extradata: an ``HEVCDecoderConfigurationRecord`` (ISO/IEC 14496-15), or units with start codes, for which the
            size is 0.

    Raises:
        EndOfBits, IndexError: the record is truncated.
    """
    if not extradata or extradata[:3] in (b"\0\0\0", b"\0\0\1"):
        return 0, list(nals(extradata, 0))
    units: list[bytes] = []
    at = 23
    for _ in range(extradata[22]):
        found, at = sized_units(extradata, at + 3, extradata[at + 1] << 8 | extradata[at + 2])
        units += found
    return (extradata[21] & 3) + 1, units


def may_hold_fields(extradata: bytes) -> bool:
    """Return whether a stream may hold fields, from the constraint flags of its configuration record, if it has one."""
    return extradata[:1] == b"\1" and bool(extradata[6] & 0x40)
