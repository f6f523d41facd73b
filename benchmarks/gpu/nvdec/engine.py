"""One decoder of `benchmarks.gpu.nvdec`, in a process of its own: NVDEC's, or FFmpeg's on a CPU."""

from __future__ import annotations

import json
import mmap
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.child import emit
from vllm_omni_sched.video.decoders.base import Decoder
from vllm_omni_sched.video.pool.messages import decode_index, decode_piece


def main() -> None:
    kind, gpu, frames = sys.argv[1:]
    with Path(frames).open("r+b") as file:
        output = memoryview(mmap.mmap(file.fileno(), 0))
    try:
        decoder = make(kind, int(gpu))
    except Exception as error:  # noqa: BLE001 - the first thing that a machine without NVDEC says
        emit("ready", failed=f"{type(error).__name__}: {error}"[:600])
        return
    emit("ready")
    for line in sys.stdin:
        try:
            told = serve(decoder, output, json.loads(line))
        except Exception as error:  # noqa: BLE001 - a clip that this decoder cannot decode is told apart from others
            told = {"failed": f"{type(error).__name__}: {error}"[:600]}
        emit("done", **told)
    decoder.close()


def make(kind: str, gpu: int) -> Decoder:
    """Raises what a decoder raises that this machine does not have."""
    if kind == "nvdec":
        from vllm_omni_sched.video.decoders.nvdec.decoder import NvdecDecoder

        return NvdecDecoder(gpu)
    from vllm_omni_sched.video.decoders.pyav import PyAvDecoder

    return PyAvDecoder()


def serve(decoder: Decoder, output: memoryview, request: dict[str, Any]) -> dict[str, Any]:
    """Open the clip, or decode some of its pieces."""
    clip = Path(request["clip"])
    if request["task"] == "open":
        index = decode_index((clip / "index").read_bytes())
        start, nbytes = request["start"], request["nbytes"]
        decoder.open(index, memoryview((clip / "packets").read_bytes()), output[start : start + nbytes])
        return {}
    pieces = [decode_piece((clip / name).read_bytes()) for name in request["pieces"]]
    begun = time.perf_counter()
    results = [decoder.decode(piece) for piece in pieces]
    return {
        "seconds": time.perf_counter() - begun,
        "decoded": sum(result.decoded for result in results),
        "found": sum(len(result.found) for result in results),
        "convert_seconds": sum(result.convert_seconds for result in results),
    }


if __name__ == "__main__":
    main()
