"""Measure how long loaders take from the bytes of a video to its frames."""

STOCK = "stock"
"""vLLM's default loader: OpenCV, whose FFmpeg decodes with as many threads as there are processors."""

FFMPEG = "FFmpeg"
"""FFmpeg alone, through PyAV: all frames up to the last wanted one, with as many threads, converted when wanted."""

OURS, OURS_ALONE = "ours", "ours, 1 decoder"
VARIANTS = (STOCK, FFMPEG, OURS, OURS_ALONE)
