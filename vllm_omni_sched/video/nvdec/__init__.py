"""Decoders of NVIDIA's cards (NVDEC), through PyNvVideoCodec 2.x.

::

    packets ─► bitstream ─► library ─► colour ─► slots
               start codes   NV12 on    RGB as    on the device, or
               in place of   the card   swscale   copied into the
               lengths                  makes it  host's

What it decodes it decodes to the bit: only codecs whose standards say what each bit is, only frames whose conversion
to RGB is the CPU's, integer for integer. For all else, and whenever something is unusual, it refuses with a reason
(`vllm_omni_sched.video.nvdec.limits.Refusal`), and the video is decoded on CPUs.

Its calls follow the interface of PyNvVideoCodec 2.0.4 and were tested against a module with that interface over
FFmpeg's decoders: it has not run on a card yet. ``python -m benchmarks.gpu.nvdec`` is what to run there first.
"""
