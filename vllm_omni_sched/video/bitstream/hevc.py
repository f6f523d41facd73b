"""HEVC (ITU-T H.265): where decoding may begin, and which pictures nobody refers to."""

from __future__ import annotations

from collections.abc import Callable

from vllm_omni_sched.video.bitstream.base import PacketFacts, ParameterSets
from vllm_omni_sched.video.bitstream.bits import Bits, nals, unescaped

_FIRST_IRAP, _LAST_IRAP, _FIRST_NON_VCL = 16, 21, 32
_VPS, _SPS, _PPS = 32, 33, 34
_LAST_BROKEN_LINK = 18
_ENDS = {36, 37}  # of a sequence, of the bitstream
_LAST_SUB_LAYER_NON_REFERENCE = 14


class HevcReader:
    """Reads packets of HEVC, of MP4 and Matroska (``hvcC``) or with start codes.

    A start is any random access picture. The leading pictures that cannot be decoded when decoding begins at it
    are shown before it, and so belong to the start before. Sub-layer non-reference pictures are droppable.

    Behind a broken link, or the end of a sequence, they are never shown, whatever was decoded before: it is irregular.
    """

    def __init__(self, extradata: bytes) -> None:
        self._length_bytes = 0
        self._sets = ParameterSets()
        self._begun = self._ended = False
        if len(extradata) > 22 and extradata[:3] not in (b"\0\0\0", b"\0\0\1"):
            self._length_bytes = (extradata[21] & 3) + 1
            for nal in _of_hvcc(extradata):
                self._parameters(nal, self._sets.of_container)
        else:
            for nal in nals(extradata, 0):
                self._parameters(nal, self._sets.of_container)

    def read(self, data: bytes, key: bool) -> PacketFacts:
        """See `PacketReader.read`."""
        facts = None
        self._sets.begin_packet()
        for nal in nals(data, self._length_bytes):
            if nal[0] >> 1 in _ENDS and not nal[0] & 1:
                self._ended = True
            if facts or len(nal) < 3 or nal[0] & 1 or nal[1] & 0xF8:  # another layer's, as in multi-view video
                continue
            kind = nal[0] >> 1
            if kind < _FIRST_NON_VCL:
                start = _FIRST_IRAP <= kind <= _LAST_IRAP and self._sets.complete
                droppable = kind <= _LAST_SUB_LAYER_NON_REFERENCE and kind % 2 == 0 and not self._sets.needed_later
                cut = self._begun and (self._ended or _FIRST_IRAP <= kind <= _LAST_BROKEN_LINK)
                self._begun, self._ended = True, False
                facts = PacketFacts(start, droppable, (nal[1] & 7) - 1, cut)
            else:
                self._parameters(nal, self._sets.in_packet)
        return facts or PacketFacts(irregular=True)

    def _parameters(self, nal: bytes, note: Callable[[int, int, bytes], None]) -> None:
        kind = nal[0] >> 1
        if kind == _VPS:
            note(kind, nal[2] >> 4, nal)
        elif kind == _SPS:
            note(kind, 0, nal)  # its number is behind a long profile; two in turn only cost starts
        elif kind == _PPS:
            note(kind, Bits(unescaped(nal)[2:]).ue(), nal)


def _of_hvcc(extradata: bytes) -> list[bytes]:
    """Parameter sets of an ``HEVCDecoderConfigurationRecord`` (ISO/IEC 14496-15)."""
    found = []
    at = 23
    for _ in range(extradata[22]):
        count = int.from_bytes(extradata[at + 1 : at + 3], "big")
        at += 3
        for _ in range(count):
            size = int.from_bytes(extradata[at : at + 2], "big")
            found.append(extradata[at + 2 : at + 2 + size])
            at += 2 + size
            if at > len(extradata):
                return found[:-1]
    return [nal for nal in found if len(nal) > 2]
