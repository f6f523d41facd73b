"""Facts from the headers of packets: where decoding may begin, and which frames no other frame needs.

The marks of containers are not enough. A marked key frame may be in the middle of a periodic intra refresh, and most
containers do not mark frames that no other refers to. Nor are a container's times always those at which frames are
shown: some muxers store decoding times instead, and some encoders mix them up.
"""

from __future__ import annotations

from vllm_omni_sched.video.bitstream.av1 import Av1Reader
from vllm_omni_sched.video.bitstream.base import PacketFacts, PacketReader
from vllm_omni_sched.video.bitstream.h264 import H264Reader
from vllm_omni_sched.video.bitstream.hevc import HevcReader
from vllm_omni_sched.video.bitstream.mpeg4 import Mpeg4Reader
from vllm_omni_sched.video.bitstream.vpx import Vp8Reader, Vp9Reader

_INTRA_ONLY = {"prores", "dnxhd", "rawvideo", "huffyuv", "png", "v210"}


_QUANTISATION_TABLES, _HUFFMAN_TABLES, _SCAN = b"\xff\xdb", b"\xff\xc4", b"\xff\xda"  # markers of JPEG


class IntraReader:
    """Reads packets of a codec whose frames are all independent."""

    def read(self, data: bytes, key: bool) -> PacketFacts:
        return PacketFacts(start=True, droppable=True, display=0)


class MjpegReader:
    """Reads packets of Motion JPEG. A picture without tables, which uses those of an earlier one, is irregular.

    If no picture has had Huffman tables, those of the standard apply, as in AVI.
    """

    def __init__(self) -> None:
        self._huffman = False

    def read(self, data: bytes, key: bool) -> PacketFacts:
        head = data[: data.find(_SCAN)] if _SCAN in data else data
        here = _HUFFMAN_TABLES in head
        alone = _QUANTISATION_TABLES in head and (here or not self._huffman)
        self._huffman |= here
        return PacketFacts(start=alone, droppable=alone, irregular=not alone, display=0)


def reader_for(codec: str, extradata: bytes) -> PacketReader | None:
    """Return the packet reader of a codec, by FFmpeg's name; None for a codec whose streams cannot be cut here.

    Raises:
        EndOfBits: the parameters in ``extradata`` are truncated.
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
    if codec == "mjpeg":
        return MjpegReader()
    return IntraReader() if codec in _INTRA_ONLY else None


__all__ = ["PacketFacts", "PacketReader", "reader_for"]
