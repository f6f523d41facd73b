"""The process of one stream, as its owner sees it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref

from vllm_omni_sched.video import wire
from vllm_omni_sched.video.live.messages import Settings, to_owner
from vllm_omni_sched.video.live.starter import start_for_life
from vllm_omni_sched.video.process import environment, how_ended

_END_SECONDS = 10.0  # after SIGKILL; a process that takes longer is stuck in the kernel


class Process:
    """The process that decodes a stream; it ends with `end`, with this object, or with the owner's process.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, settings: Settings, memory_bytes: int) -> None:
        with contextlib.ExitStack() as undo:
            control, their_control = wire.pair()
            # A socket instead of a pipe: its end can be signalled even if a forked process has inherited it.
            self.data, their_data = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            for end in (control, self.data):
                undo.callback(end.close)
            with their_control, their_data:
                arguments = (their_data.fileno(), their_control.fileno(), memory_bytes, os.getpid())
                command = [sys.executable, "-m", "vllm_omni_sched.video.live.worker", *map(str, arguments)]
                self._popen = start_for_life(
                    lambda: subprocess.Popen(
                        command,
                        pass_fds=arguments[:2],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        cwd="/",
                        env=environment(),
                        start_new_session=True,
                    )
                )
            self.data.setblocking(False)
            self.channel = wire.Channel(control, to_owner)
            self._gone = weakref.finalize(self, _end, self._popen, control, self.data)
            self.channel.send(settings)
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def end(self) -> str:
        """End the process if it still runs, and return how it ended, as text. Idempotent."""
        self._gone()
        code = self._popen.returncode
        if code is None:
            return "does not end"
        return how_ended(code)


def _end(popen: subprocess.Popen[bytes], control: socket.socket, data: socket.socket) -> None:
    if popen.poll() is None:
        popen.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(_END_SECONDS)
    control.close()  # last, because closing them earlier would not wake a thread that waits for them
    data.close()
