"""Collaborative decoding: one video is decoded by all decoders of the machine at once.

::

    bytes ─► index ─► plan ─► decoders ─► frames
             packets   pieces   processes,   one array, in display order,
             alone              NVDEC        written in place

After FlashCodec (arXiv 2512.17574): most of the time from a video to its first token is decoding, and a single decoder
is slow while others idle. A video can be cut wherever a frame needs nothing before it, and most of the frames that a
sampling rule does not want need not be decoded.
"""
