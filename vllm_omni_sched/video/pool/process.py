"""A decoder process, as its owner sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_omni_sched.video.pool.channel import Channel, memory_file, socket_pair
from vllm_omni_sched.video.pool.kinds import NO_DEVICE, DecoderKind
from vllm_omni_sched.video.pool.messages import from_worker

_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONHOME", "CUDA_", "NVIDIA_")
_END_SECONDS = 10.0  # after SIGKILL; a process that takes longer is stuck in the kernel


@dataclass(frozen=True)
class ProcessSettings:
    """The settings that all processes of a pool share.

    Attributes:
        frames: descriptor of the memory of all frames.
        index: ``module:name`` of the function that reads an index.
        device_frames: returns what processes on devices need to map the memory of frames on a device; b"" if there is
            none.
    """

    frames: int
    memory_bytes: int
    file_bytes: int
    nice: int
    index: str
    device_frames: Callable[[], bytes] = bytes


class DecoderProcess:
    """Owns a running decoder process. One thread must start and end it: the process ends with that thread.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, kind: DecoderKind, device: int, settings: ProcessSettings) -> None:
        shared = settings.device_frames() if device != NO_DEVICE else b""
        device_frames = memory_file("omni-sched-device", shared) if shared else -1
        ours, theirs = socket_pair()
        self.channel = Channel(ours, from_worker)
        arguments = {
            "socket": theirs.fileno(),
            "frames": settings.frames,
            "parent": os.getpid(),
            "device": device,
            "device-frames": device_frames,
            "memory-bytes": settings.memory_bytes,
            "file-bytes": settings.file_bytes,
            "nice": settings.nice,
            "profile": kind.profile.value,
            "decoder": kind.decoder,
            "index": settings.index,
        }
        try:
            self._popen = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vllm_omni_sched.video.pool.worker",
                    *(f"--{k}={v}" for k, v in arguments.items()),
                ],
                pass_fds=(theirs.fileno(), settings.frames, *([device_frames] if shared else [])),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=environment(),
                start_new_session=True,  # signals from the terminal must not end it, only the owner
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if shared:
                os.close(device_frames)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Return whether it has not ended yet."""
        return self._popen.poll() is None

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has sent a message or has ended."""
        return self.channel.fileno()

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Send a message.

        Raises:
            OSError: the process has ended, or does not read.
        """
        self.channel.send(message, fds)

    def end(self, grace_seconds: float = 0.0) -> str:
        """End the process, unless it ends by itself in time; return how it ended, as text."""
        self.channel.close()
        try:
            code = self._popen.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            try:
                code = self._popen.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                return "does not end, although it was killed"
        return describe_exit(code)


def describe_exit(code: int) -> str:
    """Describe how a process ended, from the code of `subprocess`; not every signal has a name."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def environment() -> dict[str, str]:
    """Return the environment of a decoder process: the locations of libraries, and no secrets."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
    paths = [os.path.abspath(path) for path in sys.path if path]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        # a decoder uses one processor, whatever thread pools libraries would start
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }
