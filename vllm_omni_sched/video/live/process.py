"""The process of one stream, as its owner sees it.

The kernel ends such a process with the *thread* that started it. Therefore a thread of our own, which ends with this
process, starts them, and not the thread of a request.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from vllm_omni_sched.video.live.messages import StreamSettings, from_worker
from vllm_omni_sched.video.pool.channel import Channel, socket_pair
from vllm_omni_sched.video.pool.process import describe_exit, environment

_Start = Callable[[], "subprocess.Popen[bytes]"]

_starts_lock = threading.Lock()
_starts: queue.SimpleQueue[tuple[_Start, Future[subprocess.Popen[bytes]]]] | None = None
_END_SECONDS = 10.0  # after SIGKILL; a process that takes longer is stuck in the kernel


class StreamProcess:
    """The process that decodes a stream; it ends with `end`, with this object, or with the owner's process.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, settings: StreamSettings, memory_bytes: int) -> None:
        with contextlib.ExitStack() as undo:
            control, worker_control = socket_pair()
            # A socket instead of a pipe: its end can be signalled even if a forked process has inherited it.
            self.data, worker_data = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            for end in (control, self.data):
                undo.callback(end.close)
            with worker_control, worker_data:
                arguments = (worker_data.fileno(), worker_control.fileno(), memory_bytes, os.getpid())
                command = [sys.executable, "-m", "vllm_omni_sched.video.live.worker", *map(str, arguments)]
                self._popen = start_process(
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
            self.channel = Channel(control, from_worker)
            self._end_once = weakref.finalize(self, _end, self._popen, control, self.data)
            self.channel.send(settings)
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def end(self) -> str:
        """End the process if it still runs, and return how it ended, as text. Idempotent."""
        self._end_once()
        code = self._popen.returncode
        if code is None:
            return "does not end, although it was killed"
        return describe_exit(code)


def _end(popen: subprocess.Popen[bytes], control: socket.socket, data: socket.socket) -> None:
    if popen.poll() is None:
        popen.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(_END_SECONDS)
    control.close()  # last, because closing them earlier would not wake a thread that waits for them
    data.close()


def start_process(start: _Start) -> subprocess.Popen[bytes]:
    """Start a process, on the thread that stays.

    Raises:
        OSError: it cannot be started.
    """
    global _starts
    with _starts_lock:
        if _starts is None:
            starts: queue.SimpleQueue[tuple[_Start, Future[subprocess.Popen[bytes]]]] = queue.SimpleQueue()
            try:
                threading.Thread(target=_run, args=(starts,), name="omni-sched-live", daemon=True).start()
            except RuntimeError as error:
                raise OSError(str(error)) from None
            _starts = starts
        starts = _starts
    started: Future[subprocess.Popen[bytes]] = Future()
    starts.put((start, started))
    return started.result()


def _run(starts: queue.SimpleQueue[tuple[_Start, Future[subprocess.Popen[bytes]]]]) -> None:
    while True:
        _start_one(*starts.get())


def _start_one(start: _Start, started: Future[subprocess.Popen[bytes]]) -> None:
    try:
        started.set_result(start())
    except BaseException as error:  # noqa: BLE001 - the error is raised in the caller
        started.set_exception(error)


def _forget() -> None:
    """Reset the state in a forked child: the thread belongs to the parent."""
    global _starts, _starts_lock
    _starts, _starts_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
