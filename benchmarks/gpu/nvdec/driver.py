"""What the driver grants, asked without PyNvVideoCodec: so that a machine that lacks it can still say why it cannot.

The structure is CUVIDDECODECAPS of NVIDIA's Video Codec SDK 12 (cuviddec.h).
"""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARIES = ("libcuda.so.1", "libnvcuvid.so.1", "libnvidia-encode.so.1")
_CODECS = {"h264": 4, "hevc": 8, "vp9": 10, "av1": 11}
_CHROMA_420 = 1


class Caps(ctypes.Structure):
    """Structure ``CUVIDDECODECAPS``; in: codec, chroma, bits; out: the rest."""

    _fields_ = [
        ("codec", ctypes.c_int),
        ("chroma", ctypes.c_int),
        ("bits_less_8", ctypes.c_uint),
        ("reserved1", ctypes.c_uint * 3),
        ("supported", ctypes.c_ubyte),
        ("engines", ctypes.c_ubyte),
        ("output_formats", ctypes.c_ushort),
        ("max_width", ctypes.c_uint),
        ("max_height", ctypes.c_uint),
        ("max_macroblocks", ctypes.c_uint),
        ("min_width", ctypes.c_ushort),
        ("min_height", ctypes.c_ushort),
        ("histogram", ctypes.c_ubyte),
        ("counter_bits", ctypes.c_ubyte),
        ("histogram_bins", ctypes.c_ushort),
        ("reserved3", ctypes.c_uint * 10),
    ]


def libraries() -> dict[str, str]:
    """Return, for each library that NVDEC needs, ``found`` or the loader's error."""
    told = {}
    for name in LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            told[name] = str(error)
        else:
            told[name] = "found"
    return told


def capabilities() -> dict[str, Any]:
    """Return the capabilities of the current CUDA context's GPU for 8-bit 4:2:0, by codec, or the error."""
    try:
        ask = ctypes.CDLL("libnvcuvid.so.1").cuvidGetDecoderCaps
    except (OSError, AttributeError) as error:
        return {"error": str(error)}
    found: dict[str, Any] = {}
    for name, number in _CODECS.items():
        caps = Caps(codec=number, chroma=_CHROMA_420)
        status = ask(ctypes.byref(caps))
        found[name] = (
            {"error": f"cuvidGetDecoderCaps: CUDA error {status}"}
            if status
            else {
                "supported": bool(caps.supported),
                "engines": caps.engines,
                "max": [caps.max_width, caps.max_height],
                "min": [caps.min_width, caps.min_height],
            }
        )
    return found
