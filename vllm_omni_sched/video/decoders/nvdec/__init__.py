"""Decoders of NVIDIA's cards (NVDEC), through PyNvVideoCodec 2.x.

::

    packets ─► bitstream ─► library ─► colour ─► slots
               start codes   NV12 on    RGB as    on the device, or
               in place of   the card   swscale   copied into the
               lengths                  makes it  host's

Decoding is exact to the bit: it supports only codecs whose standards define each bit, and only frames whose conversion
to RGB equals the CPU's, integer for integer. It refuses all other videos, and any irregularity, with a reason
(`vllm_omni_sched.video.decoders.nvdec.limits.Refusal`), and the video is decoded on CPUs.

The calls were tested with PyNvVideoCodec 2.2.4 over a double of NVIDIA's driver, and with a module that has the
interface of 2.0.4, both with FFmpeg's decoders below: they were not measured on a GPU yet. Run
``python -m benchmarks.gpu.nvdec`` there first.
"""
