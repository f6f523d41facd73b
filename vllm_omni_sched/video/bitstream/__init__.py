"""What the headers of packets say: where decoding may begin, and which frames nobody needs.

Containers mark key frames, and that is not enough: a key frame may be one in the middle of a periodic intra refresh;
and which frames no other refers to, most containers do not say at all.
"""

from __future__ import annotations

from vllm_omni_sched.video.bitstream.av1 import Av1Reader
from vllm_omni_sched.video.bitstream.base import PacketFacts, PacketReader
from vllm_omni_sched.video.bitstream.h264 import H264Reader
from vllm_omni_sched.video.bitstream.hevc import HevcReader
from vllm_omni_sched.video.bitstream.mpeg4 import Mpeg4Reader
from vllm_omni_sched.video.bitstream.vpx import Vp8Reader, Vp9Reader

_INTRA_ONLY = {"mjpeg", "prores", "dnxhd", "rawvideo", "huffyuv", "png", "v210"}


class IntraReader:
    """Reads packets of a codec whose frames all stand for themselves."""

    def read(self, data: bytes, key: bool) -> PacketFacts:
        """See `PacketReader.read`."""
        return PacketFacts(start=True, droppable=True)


def reader_for(codec: str, extradata: bytes) -> PacketReader | None:
    """Who reads packets of a codec, by FFmpeg's name of it; None for one whose streams we do not know how to cut.

    Raises:
        EndOfBits: the parameters in ``extradata`` are cut off.
    """
    if codec == "h264":
        return H264Reader(extradata)
    if codec == "hevc":
        return HevcReader(extradata)
    if codec == "av1":
        return Av1Reader(extradata)
    if codec == "mpeg4":
        return Mpeg4Reader(extradata)
    if codec in ("vp8", "vp9"):
        return Vp8Reader() if codec == "vp8" else Vp9Reader()
    return IntraReader() if codec in _INTRA_ONLY else None


__all__ = ["PacketFacts", "PacketReader", "reader_for"]
