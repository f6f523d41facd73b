"""Collaborative decoding: one video is decoded by all decoders of the machine at once.

::

    bytes ─► index ─► plan ─► decoders ─► frames
             packets   pieces   processes,   one array, in display order,
             alone              NVDEC        written in place

`service` is the entrance, and `load` follows one video through these steps:

- `demux` reads the packets of a file, and `bitstream` their headers; `frame_order` derives the order of the frames.
- `plan` cuts the video into pieces; `repair` plans again after damage.
- `pool` has the decoder processes, their tasks, and the assignment of pieces; each process is in the `sandbox`.
- `decoders` are the decoders in these processes: FFmpeg's and NVDEC's.
- `packet_memory` and `frame_memory` are the shared memory of input and output.

After FlashCodec (arXiv 2512.17574): most of the time from a video to its first token is decoding, and a single decoder
is slow while others idle. A video can be cut wherever a frame needs nothing before it, and most of the frames that a
sampling rule does not want need not be decoded.
"""
