"""One video on 1 to all NVDEC engines: how long it takes, how many a second, and is every pixel the CPU's?"""

from __future__ import annotations

CODECS = {
    "h264": ("libx264", "preset=veryfast bf=2 sc_threshold=0"),
    "hevc": ("libx265", "preset=ultrafast x265-params=log-level=none:no-open-gop=1"),
    "vp9": ("libvpx-vp9", "deadline=realtime cpu-used=8"),
    "av1": ("libsvtav1", "preset=12"),
}
"""Encoder and its options, by codec."""

WANTED = 32
"""Frames sampled of a video, as vLLM does by default; the other task is all frames."""
