"""What both sides of a message agree on."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

MAGIC, VERSION = 0x31534F56, 1  # "VOS1"
ALIGNMENT = 64
LARGE, PAGE = 256 << 10, 4096
"""Buffers from so many bytes on start at a page: copying between other places takes up to three times as long."""
HEAD = struct.Struct("<IIHHIIIQQ")
CHECKSUM = struct.Struct("<I")
PLACE = struct.Struct("<QQ")
REVIVE, PACKED, ON_DEVICE = 1, 2, 4
"""Flags: the receiver makes objects of some dicts again, with a hook that it is given; some buffers are compressed;
some lie on a device, as long as the receiver has the message."""

TENSOR, NDARRAY, IMAGE, BYTES = 1, 2, 3, 4
"""Kinds of msgpack extensions."""
packed = msgspec.msgpack.Encoder().encode
unpacked = msgspec.msgpack.Decoder().decode

Hook = Callable[[Any], Any]
