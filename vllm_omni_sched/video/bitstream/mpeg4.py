"""MPEG-4 part 2 (ISO/IEC 14496-2): I-VOPs, and B-VOPs, to which no other refers."""

from __future__ import annotations

from collections.abc import Callable

from vllm_omni_sched.video.bitstream.base import PacketFacts, ParameterSets
from vllm_omni_sched.video.bitstream.bits import Bits, EndOfBits

_VOP = b"\0\0\1\xb6"
_ENCODERS = tuple(b"\xb2" + name for name in (b"DivX", b"FFmpe", b"ffmpeg", b"Lavc", b"XviD"))  # in user data
_I, _B = 0, 2
_HEADER_BYTES = 32
_EXTENDED_ASPECT_RATIO = 15


class Mpeg4Reader:
    """Reads packets of MPEG-4. Two VOPs in one packet, as in AVI with B-VOPs, are irregular; so are VOPs that are not
    coded, for which decoders show no frame, or that of the second VOP of an earlier packet.

    The encoder's name in user data counts as a parameter: decoders imitate that encoder's deviations from the standard.
    """

    def __init__(self, extradata: bytes) -> None:
        self._sets = ParameterSets()
        self._references = 0
        self._time_bits: int | None = None
        self._parameters(extradata, self._sets.of_container)

    def read(self, data: bytes, key: bool) -> PacketFacts:
        at = data.find(_VOP)
        if at < 0 or at + 4 >= len(data):
            return PacketFacts(irregular=True, frames=0)
        self._sets.begin_packet()
        self._parameters(data[:at], self._sets.in_packet)
        kind = data[at + 4] >> 6
        vops = data[at:].split(_VOP)[1:]
        frames = sum(map(self._is_coded, vops))
        self._references += kind != _B
        # a decoder holds the last reference back, and outputs B-VOPs at once
        display = 2 * self._references - (kind == _B)
        irregular = frames != 1 or len(vops) > 1
        return PacketFacts(kind == _I and self._sets.complete, kind == _B, 0, irregular, display, frames)

    def _is_coded(self, vop: bytes) -> bool:
        """Return ``vop_coded`` of a VOP (6.2.5)."""
        if self._time_bits is None:
            return True
        bits = Bits(vop[:_HEADER_BYTES])
        try:
            bits.read(2)  # type
            while bits.flag():  # seconds
                pass
            bits.read(self._time_bits + 2)  # between two markers
            return bits.flag()
        except EndOfBits:
            return False

    def _parameters(self, headers: bytes, note: Callable[[int, int, bytes], None]) -> None:
        """Record the video object layer's header, and the encoder."""
        for part in headers.split(b"\0\0\1")[1:]:
            if part and 0x20 <= part[0] <= 0x2F:
                note(0, part[0], part)
                self._time_bits = _time_bits(part)
            elif part.startswith(_ENCODERS):
                note(1, part[1], part)


def _time_bits(layer: bytes) -> int | None:
    """Return the bits of a VOP's time within its second, from the video object layer's header (6.2.3); None if it is
    damaged.
    """
    bits = Bits(layer[1:_HEADER_BYTES])
    try:
        bits.read(9)  # random access, type
        if bits.flag():
            bits.read(7)  # version, priority
        if bits.read(4) == _EXTENDED_ASPECT_RATIO:
            bits.read(16)
        if bits.flag():
            bits.read(3)  # chroma format, low delay
            if bits.flag():
                bits.read(79)  # buffer
        bits.read(3)  # shape, marker
        return max(1, (bits.read(16) - 1).bit_length())
    except EndOfBits:
        return None
