"""One pipeline of three stages that serves rounds, as told on stdin: the subprocess that `benchmarks.handover` starts.

{"variant": "ArenaConnector", "turn": 3} → {"kind": "round", "messages": […], "answers": {…}, "seconds": …}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.handover.stamps import HandOver, read
from benchmarks.harness.child import emit
from dev.omni_cpu import forkserver
from dev.omni_cpu.asking import Ask, answer_to
from dev.omni_cpu.running import running
from dev.omni_cpu.spec import MODES, TEXT_TO_SOUND, PipelineSpec


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--first-bytes", type=int, required=True)
    parser.add_argument("--later-bytes", type=int, required=True)
    options = parser.parse_args()
    forkserver.start("benchmarks.handover.connector")
    import vllm_omni
    import vllm_omni.entrypoints.async_omni

    forkserver.use_for_stages()
    extra = {
        "folder": str(options.folder),
        "first_bytes": options.first_bytes,
        "later_bytes": options.later_bytes,
    }
    spec = PipelineSpec(TEXT_TO_SOUND, options.mode, "TimedConnector", extra, max_num_seqs=options.requests)
    with running(spec, model=options.model, folder=options.folder) as omni:
        emit("up", vllm_omni=vllm_omni.__version__)
        asyncio.run(serve(omni, spec, options.requests, options.folder))


async def serve(omni: Any, spec: PipelineSpec, requests: int, folder: Path) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        prefix = f"{asked['variant']}-{asked['turn']}"
        _, looks, look_seconds = read(folder)
        started = time.monotonic()
        answers = await asyncio.gather(
            *(answer_to(omni, spec, f"{prefix}-{number}", ask_of(number)) for number in range(requests))
        )
        seconds = time.monotonic() - started
        messages, looks_now, look_seconds_now = read(folder)
        emit(
            "round",
            messages=[times_of(message) for message in messages if message.key.startswith(f"{prefix}-")],
            answers={str(number): answer for number, answer in enumerate(answers)},
            seconds=seconds,
            looks=looks_now - looks,
            seconds_per_look=(look_seconds_now - look_seconds) / max(1, looks_now - looks),
        )


def ask_of(number: int) -> Ask:
    """Prompts and answers of several lengths, each of its own."""
    return Ask(f"Request {number} asks. " * (1 + number % 7), thinks=4 + number % 9, says=8 + number % 13)


def times_of(message: HandOver) -> dict[str, Any]:
    """Seconds of one message; it is handed over from when it is both there and wanted until its receiver has it."""
    return {
        "first": message.key.endswith("_0"),
        "edge": message.edge,
        "hand-over": message.get_end - max(message.put_begin, message.asked),
        "put": message.put_end - message.put_begin,
        "turn": max(0.0, message.get_begin - max(message.put_end, message.asked)),
        "get": message.get_end - message.get_begin,
        "put to got": message.get_end - message.put_begin,
        "floor": message.floor,
    }


if __name__ == "__main__":
    main()
