"""Collaborative decoding: one video, decoded by every decoder there is.

::

    bytes ─► index ─► plan ─► decoders ─► frames
             packets   pieces   processes,   one array, in display order,
             alone              NVDEC        written in place

After FlashCodec (arXiv 2512.17574): the time from a video to its first token is mostly decoding, and a decoder alone
is slow, while others idle. A video can be cut wherever a frame needs nothing before it; and most of what a sampling
rule does not want need not be decoded at all.
"""
