"""Decoding of streams while they arrive: cameras, broadcasts, files that still grow.

::

    feed ─► socket ─► demux, decode ─► ring of slots ─► frames
    owner             a process of its own,            owner
                      sandboxed like all decoders

A stream has no index, so no part of it is skipped or cut: one process decodes it in sequence, and converts the frames
that the sampling rule wants. Memory is bounded everywhere: if no frames are taken, the ring fills up, so that the
process stops reading, the socket fills up, and `LiveVideo.feed` waits.
"""

from vllm_omni_sched.video.live.sampling import Sampling
from vllm_omni_sched.video.live.stream import Counts, LiveFrame, LiveVideo

__all__ = ["Counts", "LiveFrame", "LiveVideo", "Sampling"]
