"""The parts of `python -m benchmarks.gpu`, in order of value, each with a bound on its time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Outcome(str, Enum):
    """Says how a part ended."""

    DONE = "done"
    WRONG = "wrong"  # it has figures, but what it checks was not so
    SKIPPED = "skipped"  # something that it needs is not here
    OUT_OF_TIME = "out of time"
    FAILED = "failed"


@dataclass(frozen=True)
class Machine:
    """Describes this machine.

    ``memory_bytes``: of the first GPU. ``installed``: distributions that can be imported, of those that parts need.
    ``shared_memory_bytes``: free in /dev/shm.
    """

    gpu: str
    memory_bytes: int
    installed: frozenset[str] = frozenset()
    shared_memory_bytes: int = 0


@dataclass(frozen=True)
class Part:
    """A benchmark in a process of its own, which is ended after ``seconds``.

    ``result``: begin of the name of its result file. ``lacks``: why it cannot run here, empty if it can.
    """

    name: str
    question: str
    module: str
    arguments: tuple[str, ...]
    seconds: float
    result: str
    lacks: str = ""


@dataclass(frozen=True)
class Ended:
    """A part that was run or skipped; ``rows``: its results."""

    part: Part
    outcome: Outcome
    seconds: float = 0.0
    reason: str = ""
    rows: Sequence[dict[str, Any]] | dict[str, Any] = ()

    def record(self) -> dict[str, Any]:
        """Return the record of the result file."""
        return {
            "part": self.part.name,
            "question": self.part.question,
            "command": " ".join(["python -m", self.part.module, *self.part.arguments]),
            "outcome": self.outcome.value,
            "seconds": round(self.seconds, 1),
            "bound_seconds": self.part.seconds,
            "reason": self.reason,
            "results": self.rows,
        }


_FULL_BYTES = 24 << 30  # for the 7B decoder of the lanes benchmark with its KV cache
_LANES_BYTES = 8 << 30
_IPC_BYTES = 1200 << 20


def parts(machine: Machine, minutes: float = 10.0) -> list[Part]:
    """Return all parts, the most valuable first; their bounds add up to ``minutes``, and their work is cut to fit.

    1. How much decode is slowed down beside encodes decides whether encode-ahead is worth having on GPUs at all.
    2. Device IPC, NVDEC, frames that stay on the GPU and the host tier decide what their options default to.
    3. A whole vLLM comes last: it is slow to start, and its figures are the hardest to read.
    """
    share = minutes / 10.0
    layers = "32" if machine.memory_bytes >= _FULL_BYTES else "8"
    large = machine.shared_memory_bytes >= 2 * _IPC_BYTES
    found = [
        Part(
            "lanes",
            "What do tokens pay for an encoder beside them, by kind of lane and share of the multiprocessors?",
            "benchmarks.gpu.lanes",
            ("--rounds", "3", "--seconds", f"{2.0 * share:g}", "--layers", layers),
            165 * share,
            "gpu-lanes",
            "" if machine.memory_bytes >= _LANES_BYTES else "it needs 8 GiB of GPU memory",
        ),
        Part(
            "ipc",
            "Is a tensor passed between processes sooner by CUDA IPC than through host memory?",
            "benchmarks.gpu.ipc",
            ("--rounds", "2", "--sizes", "64 KB,1 MB,4 MB,16 MB,256 MB" if large else "64 KB,1 MB,4 MB,16 MB"),
            40 * share,
            "gpu-ipc",
        ),
        Part(
            "nvdec",
            "What do 1 to all decoding engines make of one video, and is every pixel right?",
            "benchmarks.gpu.nvdec",
            ("--rounds", "2", "--seconds", "10", "--codecs", "h264,hevc,av1"),
            115 * share,
            "gpu-nvdec",
            _missing(machine, "PyNvVideoCodec"),
        ),
        Part(
            "frames",
            "Are frames that NVDEC decodes on the GPU sooner if they stay there than through host memory?",
            "benchmarks.gpu.frames",
            ("--rounds", "5", "--seconds", "5"),
            65 * share,
            "gpu-frames",
            _missing(machine, "PyNvVideoCodec", "av"),
        ),
        Part(
            "copies",
            "Are encodings restored from host memory sooner than encoded, and frames put together on the device?",
            "benchmarks.gpu.copies",
            ("--rounds", "20"),
            30 * share,
            "gpu-copies",
        ),
        Part(
            "vllm",
            "What do latencies of a whole vLLM gain by encode-ahead on this GPU?",
            "benchmarks.mixed",
            (
                "--large",
                "--side",
                "448",
                "--loads",
                "4,12",
                "--rounds",
                "1",
                "--seconds",
                f"{15 * share:g}",
                "--name=-gpu",
            ),
            185 * share,
            "mixed-",
            "" if "vllm" in machine.installed else "vLLM is not installed",
        ),
    ]
    return found


def _missing(machine: Machine, *names: str) -> str:
    return next((f"{name} is not installed" for name in names if name not in machine.installed), "")
