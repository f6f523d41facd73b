"""A subprocess of `benchmarks.video`, which loads videos by one loader.

{"do": "load", "clips": [path, …], "options": {"num_frames": 32}, "memory": true}
    → {"kind": "loaded", "seconds": 1.2, "frames": 32, "nbytes": …, "digest": …, "peak_bytes": …}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.child import emit
from benchmarks.video import FFMPEG, OURS_ALONE, STOCK, VARIANTS
from benchmarks.video.clips import TINY, encoded
from benchmarks.video.memory import Peak, held

Load = Callable[..., tuple[np.ndarray, list[int]]]
THREADS = 8  # of vLLM's pool for loading media


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", required=True, choices=VARIANTS)
    parser.add_argument("--cores", type=int, default=0, help="0: all")
    options = parser.parse_args()
    if options.cores:  # before a library counts them
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    load, version = loader(options.variant)
    load(encoded(TINY).read_bytes(), num_frames=-1)  # loads libraries, and starts decoders
    idle_bytes = held()
    emit("up", vllm=version)
    for line in sys.stdin:
        answer = measured(load, json.loads(line))
        emit("loaded", **answer, peak_bytes=answer.pop("held_bytes") - idle_bytes)


def loader(variant: str) -> tuple[Load, str]:
    import vllm
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

    name = "opencv"
    if variant not in (STOCK, FFMPEG):
        from vllm_omni_sched.plugin import register

        if variant == OURS_ALONE:
            from vllm_omni_sched.engine.video import service
            from vllm_omni_sched.video.options import VideoOptions

            service.configure(VideoOptions(decoders=1))
        register()
        name = "omni_flashcodec"
    stock = VIDEO_LOADER_REGISTRY.load(name)

    def load(data: bytes, **how: Any) -> tuple[np.ndarray, list[int]]:
        frames, metadata = stock.load_bytes(data, **how)
        return frames, list(metadata["frames_indices"])

    return (by_ffmpeg if variant == FFMPEG else load), vllm.__version__


def by_ffmpeg(data: bytes, **how: Any) -> tuple[np.ndarray, list[int]]:
    """Decode all frames up to the last wanted one, in order."""
    import io

    import av
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY, VideoSourceMetadata, VideoTargetMetadata

    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.thread_type, stream.thread_count = "AUTO", len(os.sched_getaffinity(0))
        source = VideoSourceMetadata(stream.frames, float(stream.guessed_rate), stream.frames / stream.guessed_rate)
        target = VideoTargetMetadata(how.get("num_frames", -1), how.get("fps", -1), 300)
        wanted = VIDEO_LOADER_REGISTRY.load("opencv").compute_frames_index_to_sample(source, target)
        out = np.empty((len(wanted), stream.height, stream.width, 3), np.uint8)
        slots = {frame: slot for slot, frame in enumerate(wanted)}
        for number, frame in enumerate(container.decode(stream)):
            if number in slots:
                out[slots[number]] = frame.to_ndarray(format="rgb24")
            if number == wanted[-1]:
                break
    return out, wanted


def measured(load: Load, request: dict[str, Any]) -> dict[str, Any]:
    data = [Path(path).read_bytes() for path in request["clips"]]
    watch = Peak() if request.get("memory") else nullcontext()
    with ThreadPoolExecutor(THREADS) as pool, watch:
        began, process_began = time.perf_counter(), cpu_seconds()
        videos = list(pool.map(lambda one: load(one, **request["options"]), data))
        seconds, used = time.perf_counter() - began, cpu_seconds() - process_began
    return {
        "seconds": seconds,
        "cpu_seconds": used,
        "frames": sum(len(frames) for frames, _ in videos),
        "nbytes": sum(frames.nbytes for frames, _ in videos),
        "digest": [[zlib.crc32(frames), zlib.crc32(np.array(indices))] for frames, indices in videos],
        "held_bytes": watch.peak_bytes if isinstance(watch, Peak) else 0,
    }


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children."""
    import psutil

    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(one.user + one.system for one in times)


if __name__ == "__main__":
    main()
