"""Measure the time to first token of requests with videos that arrive together."""

STOCK, OURS = "stock", "ours"

MEDIA = {STOCK: {}, OURS: {"video_backend": "omni_flashcodec"}}
"""The video part of ``--media-io-kwargs`` by variant; everything else is the same, including the scheduler."""
