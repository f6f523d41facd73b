"""One decoder process, from its owner's side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from vllm_omni_sched.video import messages, wire
from vllm_omni_sched.video.kinds import Kind

_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONHOME", "CUDA_", "NVIDIA_")
_END_SECONDS = 10.0  # after SIGKILL; a process that takes longer is stuck in the kernel


@dataclass(frozen=True)
class Settings:
    """What all processes of a team have in common.

    Attributes:
        frames: descriptor of the memory of all frames.
        index: ``module:name`` of what reads an index.
    """

    frames: int
    memory_bytes: int
    file_bytes: int
    nice: int
    index: str


class Process:
    """A decoder process that was started. To be started, and ended, by one thread: when that ends, so does it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, kind: Kind, device: int, settings: Settings) -> None:
        ours, theirs = wire.pair()
        self.channel = wire.Channel(ours, messages.to_owner)
        arguments = {
            "socket": theirs.fileno(),
            "frames": settings.frames,
            "parent": os.getpid(),
            "device": device,
            "memory-bytes": settings.memory_bytes,
            "file-bytes": settings.file_bytes,
            "nice": settings.nice,
            "profile": kind.profile.value,
            "decoder": kind.decoder,
            "index": settings.index,
        }
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "vllm_omni_sched.video.worker", *(f"--{k}={v}" for k, v in arguments.items())],
                pass_fds=(theirs.fileno(), settings.frames),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=environment(),
                start_new_session=True,  # the owner decides, not whoever presses a key
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._popen.poll() is None

    def fileno(self) -> int:
        """Readable when it has said something, or has ended."""
        return self.channel.fileno()

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send a message.

        Raises:
            OSError: it is gone, or does not listen.
        """
        self.channel.send(message, fds)

    def end(self, grace_seconds: float = 0.0) -> str:
        """End it, if it does not end by itself; how it ended, for people. Nothing of it runs afterwards."""
        self.channel.close()
        try:
            code = self._popen.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            try:
                code = self._popen.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                return "does not end"
        return how_ended(code)


def how_ended(code: int) -> str:
    """How a process ended, for people, by what `subprocess` says; not every signal has a name."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def environment() -> dict[str, str]:
    """What a decoder process sees of this one's environment: where libraries lie, and none of its secrets."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
    paths = [os.path.abspath(path) for path in sys.path if path]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        # one decoder is one processor, whatever libraries think of threads
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }
