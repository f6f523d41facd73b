"""Measure copies: encodings to host memory and back, and frames put together on the device or on the host."""

from __future__ import annotations

EMBEDS = (256, 1024, 4096, 16384)
"""Sizes of encodings, in embeddings of 4,096 numbers of 16 bits."""

FRAMES = (32, 128)
"""Frames of 1280 x 720 that several decoders have made of one video."""

PIECES = 4
IMAGE_EMBEDS = 576
"""Embeddings that the tower makes of one image."""
