"""Constants and structures that both sides of a message share."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

MAGIC, VERSION = 0x31534F56, 3  # "VOS1"
ALIGNMENT = 64
LARGE, PAGE = 256 << 10, 4096
"""Size in bytes from which buffers start at a page: copies between other addresses take up to three times as long."""
HEAD = struct.Struct("<IIHHIIIQQQI")
CHECKSUM = struct.Struct("<I")
PLACE = struct.Struct("<QQ")
REVIVE, PACKED, ON_DEVICE, CHECKED = 1, 2, 4, 8
"""Flags: the receiver makes objects of some dicts again, with a hook that it is given; some buffers are compressed;
some lie on a device, as long as the receiver has the message; the header has a checksum of the buffers, too."""

TENSOR, NDARRAY, IMAGE, BYTES = 1, 2, 3, 4
"""Kinds of msgpack extensions."""
VALUE = struct.Struct("<IH")
"""Head of an extension: the number of the buffer, and the length of the description (msgpack of dtype and shape)."""
HERE = 0xFFFFFFFF
"""Value instead of a buffer's number: the bytes follow the description."""
EMBEDDED = 4096
"""Size in bytes up to which a value is in the body, which always has a checksum: in shared memory, copying it once more
and checking it costs no more than a separate buffer without a checksum. For twice the size it does."""
packed = msgspec.msgpack.Encoder().encode
unpacked = msgspec.msgpack.Decoder().decode

Hook = Callable[[Any], Any]
