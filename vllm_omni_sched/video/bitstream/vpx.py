"""VP8 (RFC 6386) and VP9 (its bitstream specification, 0.6): key frames that are shown.

No frame is droppable: a frame to which no other refers may still change the probabilities of later ones.
"""

from __future__ import annotations

from vllm_omni_sched.video.bitstream.base import PacketFacts
from vllm_omni_sched.video.bitstream.bits import Bits


class Vp8Reader:
    """Reads packets of VP8."""

    def read(self, data: bytes, key: bool) -> PacketFacts:
        shown = len(data) > 3 and bool(data[0] & 0x10)
        return PacketFacts(start=shown and not data[0] & 1, irregular=not shown, display=0, frames=int(shown))


class Vp9Reader:
    """Reads packets of VP9: a frame, or a superframe whose last frame is shown."""

    def read(self, data: bytes, key: bool) -> PacketFacts:
        frames = _frames(data)
        shown = [_header(frame) for frame in frames]
        start = shown[0] == (True, True)
        count = sum(is_shown for _, is_shown in shown)
        return PacketFacts(start=start, irregular=count != 1, display=0, frames=count)


def _header(frame: bytes) -> tuple[bool, bool]:
    """Return whether it is a key frame, and whether it is shown."""
    bits = Bits(frame[:2])
    bits.read(2)  # frame_marker
    profile = bits.read(1) | bits.read(1) << 1
    if profile == 3:
        bits.read(1)
    if bits.flag():  # show_existing_frame
        return False, True
    return not bits.flag(), bits.flag()


def _frames(data: bytes) -> list[bytes]:
    """Return the frames of a superframe (Annex B), or the only frame."""
    marker = data[-1] if data else 0
    if marker & 0xE0 == 0xC0:
        count, size_bytes = (marker & 7) + 1, (marker >> 3 & 3) + 1
        index = data[-2 - count * size_bytes :]
        if len(index) == 2 + count * size_bytes and index[0] == marker:
            frames, at = [], 0
            for i in range(count):
                size = int.from_bytes(index[1 + i * size_bytes : 1 + (i + 1) * size_bytes], "little")
                frames.append(data[at : at + size])
                at += size
            return [frame for frame in frames if frame] or [data]
    return [data]
