"""Where the time of the engine's processes goes: py-spy on each of them at once, summed up by function."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

RATE = 100  # samples a second
# A thread found in one of these waits for another process or for work (py-spy counts it as running when just woken).
WAITING = {"wait", "poll", "select", "sched_yield", "_recv", "_worker", "accept", "GarbageCollectorThread.run"}
PLUMBING = (
    "<frozen",
    "<string>",
    "asyncio/",
    "multiprocessing/",
    "(threading.py",
    "(contextlib.py",
    "<module>",
    "_main ",
)


@dataclass(frozen=True)
class Profile:
    """Samples of the threads of one process that were doing something. Shares are of those samples, 0 to 1."""

    samples: int
    busy: float  # working threads on average over the recorded time
    own: list[tuple[str, float]]  # the function a thread was in
    inclusive: list[tuple[str, float]]  # the function it was in or under


def record(processes: Mapping[str, int], seconds: int) -> dict[str, Profile]:
    """Sample every process (id by role) for `seconds`. Raises FileNotFoundError when py-spy is not installed."""
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if spy is None:
        raise FileNotFoundError("--profile needs py-spy: pip install py-spy")
    with tempfile.TemporaryDirectory() as folder:
        files = {role: Path(folder, f"{pid}.txt") for role, pid in processes.items()}
        command = [spy, "record", "--duration", str(seconds), "--rate", str(RATE), "--format", "raw"]
        spies = [
            subprocess.Popen(
                [*command, "--pid", str(pid), "--output", str(files[role])],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for role, pid in processes.items()
        ]
        for process in spies:
            process.wait()
        return {
            role: summarise(path.read_text().splitlines(), seconds) for role, path in files.items() if path.exists()
        }


def summarise(stacks: Iterable[str], seconds: float, top: int = 12) -> Profile:
    """Sum up collapsed stacks (`outer;inner;innermost 42`, py-spy's raw format)."""
    own: Counter[str] = Counter()
    inclusive: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        frames = [frame_name(frame) for frame in stack.split(";")]
        if is_waiting(frames[-1]):
            continue
        own[frames[-1]] += int(count)
        for frame in set(frames):
            if not any(part in frame for part in PLUMBING):
                inclusive[frame] += int(count)
    total = own.total()

    def shares(counts: Counter[str]) -> list[tuple[str, float]]:
        return [(name, round(count / total, 3)) for name, count in counts.most_common(top)]

    return Profile(total, round(total / (seconds * RATE), 3), shares(own), shares(inclusive))


def is_waiting(frame: str) -> bool:
    function = frame.partition(" (")[0]
    return function in WAITING or function.rpartition(".")[2] in WAITING


def frame_name(frame: str) -> str:
    """`update (vllm/v1/core/sched/scheduler.py:12)` → `update (sched/scheduler.py)`: one entry per function."""
    name, _, place = frame.partition(" (")
    place = re.sub(r":\d+\)?$", "", place.rstrip(")"))
    return f"{name} ({'/'.join(place.split('/')[-2:])})" if place else name
