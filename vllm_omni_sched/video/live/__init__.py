"""Streams that are decoded as they arrive: cameras, broadcasts, files that still grow.

::

    feed ─► socket ─► demux, decode ─► ring of slots ─► frames
    owner             a process of its own,            owner
                      locked in as all decoders are

A stream has no index, so nothing of it is skipped or cut: one process decodes it in sequence, and converts the frames
that the sampling rule wants. Memory is bounded on every way: where nobody takes frames the ring is full, so the process
stops reading, so the socket is full, so `LiveVideo.feed` waits.
"""

from vllm_omni_sched.video.live.base import Counts, LiveFrame
from vllm_omni_sched.video.live.sampling import Sampling
from vllm_omni_sched.video.live.stream import LiveVideo

__all__ = ["Counts", "LiveFrame", "LiveVideo", "Sampling"]
