"""Constants and structures that both sides of a message share."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

MAGIC, VERSION = 0x31534F56, 3  # "VOS1"
ALIGNMENT = 64
LARGE, PAGE = 256 << 10, 4096
"""Buffers from so many bytes on start at a page: copying between other places takes up to three times as long."""
HEAD = struct.Struct("<IIHHIIIQQQI")
CHECKSUM = struct.Struct("<I")
PLACE = struct.Struct("<QQ")
REVIVE, PACKED, ON_DEVICE, CHECKED = 1, 2, 4, 8
"""Flags: the receiver makes objects of some dicts again, with a hook that it is given; some buffers are compressed;
some lie on a device, as long as the receiver has the message; the header has a checksum of the buffers, too."""

TENSOR, NDARRAY, IMAGE, BYTES = 1, 2, 3, 4
"""Kinds of msgpack extensions."""
VALUE = struct.Struct("<IH")
"""In front of an extension: which buffer, and how long the description is that follows (msgpack of dtype and shape)."""
HERE = 0xFFFFFFFF
"""In place of a buffer's number: the bytes follow the description."""
EMBEDDED = 2048
"""Up to so many bytes a value is in the body: a buffer of its own costs more than copying it once more."""
packed = msgspec.msgpack.Encoder().encode
unpacked = msgspec.msgpack.Decoder().decode

Hook = Callable[[Any], Any]
