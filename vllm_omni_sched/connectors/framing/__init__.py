"""A payload as one flat message: a checked header, a msgpack body, and raw aligned buffers. Nothing is pickled.

::

    0   checksum of all up to the buffers but itself, magic, version, flags,
        bytes of name, bytes of body, number of buffers, generation, bytes in all,
        checksum of all buffers (0 unless the transport asks for one)
    44  where each buffer lies: offset, bytes (16 each)
    …   name (edge and key)
    …   body: msgpack, in which an array is an extension: its place in the table, dtype, shape; small ones are all there
    …   the buffers, each at a multiple of 64, large ones at a page

Checksums are CRC-32. The front always has one: no message is mistaken for another one, and no shape or key is read
from damaged bytes. A checksum of the buffers costs both sides one more pass over them, so each transport decides.

Arrays and tensors are copied once, from where they are (a device, too) to where the message is written, and come out as
views of the message. Everything else goes through msgspec as in vLLM-Omni's own serializer, so that a payload arrives
as the same dicts, whatever connector carried it.
"""

from vllm_omni_sched.connectors.framing.arrival import Arrival, Unpack, flags_of, message_of
from vllm_omni_sched.connectors.framing.message import (
    ALIGNMENT,
    ON_DEVICE,
    PACKED,
    REVIVE,
    Hook,
    Message,
    make_message,
)

__all__ = [
    "ALIGNMENT",
    "ON_DEVICE",
    "PACKED",
    "REVIVE",
    "Arrival",
    "Hook",
    "Message",
    "Unpack",
    "flags_of",
    "make_message",
    "message_of",
]
