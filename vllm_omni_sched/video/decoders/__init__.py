"""The decoders of frames: FFmpeg's on the CPU (`pyav`, `convert`), and NVDEC's on GPUs (`nvdec`)."""
