"""MPEG-4 part 2 (ISO/IEC 14496-2): I-VOPs, and B-VOPs, to which no other refers."""

from __future__ import annotations

from collections.abc import Callable

from vllm_omni_sched.video.bitstream.base import PacketFacts, ParameterSets

_VOP = b"\0\0\1\xb6"
_ENCODERS = tuple(b"\xb2" + name for name in (b"DivX", b"FFmpe", b"ffmpeg", b"Lavc", b"XviD"))  # in user data
_I, _B = 0, 2
_SHORT_BYTES = 12
"""Largest size of a VOP that may be not coded, for which decoders show no frame."""


class Mpeg4Reader:
    """Reads packets of MPEG-4. Two VOPs in one packet, as in AVI with B-VOPs, are irregular.

    The encoder's name in user data counts as a parameter: decoders imitate that encoder's deviations from the standard.
    """

    def __init__(self, extradata: bytes) -> None:
        self._sets = ParameterSets()
        self._references = 0
        self._parameters(extradata, self._sets.of_container)

    def read(self, data: bytes, key: bool) -> PacketFacts:
        at = data.find(_VOP)
        if at < 0 or at + 4 >= len(data):
            return PacketFacts(irregular=True)
        self._sets.begin_packet()
        self._parameters(data[:at], self._sets.in_packet)
        kind = data[at + 4] >> 6
        irregular = len(data) - at <= _SHORT_BYTES or data.find(_VOP, at + 4) >= 0
        self._references += kind != _B
        # a decoder holds the last reference back, and outputs B-VOPs at once
        display = 2 * self._references - (kind == _B)
        return PacketFacts(kind == _I and self._sets.complete, kind == _B, 0, irregular, display)

    def _parameters(self, headers: bytes, note: Callable[[int, int, bytes], None]) -> None:
        """Record the video object layer's header, and the encoder."""
        for part in headers.split(b"\0\0\1")[1:]:
            if part and 0x20 <= part[0] <= 0x2F:
                note(0, part[0], part)
            elif part.startswith(_ENCODERS):
                note(1, part[1], part)
