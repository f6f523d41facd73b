"""The processes of a process lane, and of the preprocessing pool.

The owner forks a *fork server* once, from a thread of its own. The fork server keeps the state of that moment, does no
work, and forks the process that works; when that one dies, it forks another. So a replacement is never forked from an
owner whose threads are in the middle of something, and the OpenMP runtime, which belongs to the thread that used it,
starts anew in the child.
"""

import contextlib
import gc
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import LaneError
from vllm_omni_sched.lanes import messages
from vllm_omni_sched.lanes.base import Pacer, Work
from vllm_omni_sched.lanes.memory import MemoryPeak
from vllm_omni_sched.lanes.width import Widening, Width

_SHARE = struct.Struct("d")  # written by the owner: the lane's share
_CURRENT = struct.Struct("Q")  # written by the worker: number of its current job; 0 between jobs
_CURRENT_AT = _SHARE.size
_WIDE_AT = _CURRENT_AT + _CURRENT.size  # one byte, written by the owner: whether the lane may use all processors
_THREADS_AT = _WIDE_AT + 1  # one byte, written by the owner: with how many threads a job of a pool may run
_MOST_THREADS = 255
_OWNER_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""The owner's ends of all channels of this process. A child must not keep one open, or the other side would never see
it closed."""

Serve = Callable[[socket.socket, mmap.mmap], None]
"""What the working process does: it gets its end of the channel, and the page that it shares with its owner."""


def _write(page: mmap.mmap, at: int, word: bytes) -> None:
    """Write a word into shared memory in one piece, because another process may be reading it.

    `struct.Struct.pack_into` writes zeros first, and a lane that reads its share as 0 cannot work.
    """
    page[at : at + len(word)] = word


class ForkServer:
    """The fork server as its owner sees it: it starts the working process, and its replacements.

    Args:
        serve: runs in the working process, which ends when it returns.
        prepare: runs once in the fork server, before it forks anything.

    Raises:
        LaneError: this platform cannot fork such a process, or the fork server has ended.
    """

    def __init__(self, serve: Serve, prepare: Callable[[], None] = lambda: None) -> None:
        if not hasattr(os, "memfd_create"):
            raise LaneError("encoder work in a process of its own needs Linux, for memory files and forks")
        self._page = mmap.mmap(-1, mmap.PAGESIZE)  # shared with all children
        self.share = 1.0
        self._socket, theirs = messages.channel()
        _OWNER_SOCKETS.add(self._socket)
        self.pid = 0
        self._server_pid = _fork_from_new_thread(lambda: _serve_forks(theirs, self._page, serve, prepare))
        theirs.close()

    @property
    def share(self) -> float:
        """Return the share of the time that the working process uses, in (0, 1]."""
        share: float = _SHARE.unpack_from(self._page)[0]
        return share

    @share.setter
    def share(self, share: float) -> None:
        _write(self._page, 0, _SHARE.pack(share))

    @property
    def wide(self) -> bool:
        """Return whether the working process may use the processors of all lanes."""
        return bool(self._page[_WIDE_AT])

    @wide.setter
    def wide(self, wide: bool) -> None:
        self._page[_WIDE_AT] = wide

    @property
    def threads(self) -> int:
        """Return with how many threads the working process may run its job."""
        return threads_of(self._page)

    @threads.setter
    def threads(self, threads: int) -> None:
        self._page[_THREADS_AT] = min(threads, _MOST_THREADS)

    @property
    def current_job(self) -> int:
        """Return the number of the job that the working process is at, or was at when it died; 0 for none."""
        number: int = _CURRENT.unpack_from(self._page, _CURRENT_AT)[0]
        return number

    def spawn(self) -> socket.socket:
        """Start a working process, and return the channel to it.

        Raises:
            LaneError: it cannot be started, or the fork server has ended.
        """
        _write(self._page, _CURRENT_AT, _CURRENT.pack(0))
        ours, theirs = messages.channel()
        _OWNER_SOCKETS.add(ours)
        try:
            self.pid = int(self._ask(b"spawn", theirs.fileno()))
        except LaneError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def kill(self) -> None:
        """Kill the working process; `end_of_last` must follow, which waits for its end."""
        with contextlib.suppress(ProcessLookupError):  # its end was not waited for, so the id is not in use elsewhere
            os.kill(self.pid, signal.SIGKILL)

    def end_of_last(self) -> str:
        """Return how the last working process ended, as text for error messages.

        Raises:
            LaneError: the fork server has ended.
        """
        status = int(self._ask(b"wait"))
        if os.WIFSIGNALED(status):
            return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"ended with exit code {os.waitstatus_to_exitcode(status)}"

    def _ask(self, command: bytes, *descriptors: int) -> bytes:
        """Send a command, with descriptors, to the fork server, and return its answer."""
        try:
            socket.send_fds(self._socket, [command], descriptors)
            answer = self._socket.recv(64)
        except OSError as error:
            raise LaneError(f"the fork server, which starts encoder processes, does not answer: {error}") from None
        if not answer:
            raise LaneError("the fork server, which starts encoder processes, has ended")
        return answer

    def close(self, timeout: float) -> None:
        """End all processes; those that do not end within ``timeout`` seconds are killed."""
        self._socket.close()  # the fork server then ends its child and itself
        until = monotonic_seconds() + timeout
        with contextlib.suppress(ChildProcessError):  # a process that ignores SIGCHLD is not notified of a child's end
            while not os.waitpid(self._server_pid, os.WNOHANG)[0]:
                if monotonic_seconds() >= until:
                    for pid in (self.pid, self._server_pid):
                        with contextlib.suppress(ProcessLookupError):  # it may end by itself at this moment
                            os.kill(pid, signal.SIGKILL)
                    os.waitpid(self._server_pid, 0)
                    return
                sleep_seconds(0.005)


def threads_of(page: mmap.mmap) -> int:
    """Return with how many threads the working process may run its job at this moment; called in that process."""
    return max(1, page[_THREADS_AT])


def _fork_from_new_thread(child: Any) -> int:
    """Fork in a thread that has used no library yet; ``child`` runs there and does not return."""
    pids: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            _run_and_exit(child)
        pids.append(pid)

    thread = threading.Thread(target=fork, name="omni-sched-fork")
    thread.start()
    thread.join()
    return pids[0]


def _run_and_exit(function: Any) -> NoReturn:
    code = 1
    try:
        function()
        code = 0
    except SystemExit as end:  # the work gives the process up, and has said why
        print(end, file=sys.stderr, flush=True)
    except BaseException:  # noqa: BLE001 - a forked child must never go on in its parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _close_owner_sockets() -> None:
    for owners in list(_OWNER_SOCKETS):
        owners.close()


os.register_at_fork(after_in_child=_close_owner_sockets)


def _serve_forks(end: socket.socket, page: mmap.mmap, serve: Serve, prepare: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the owner decides, by closing its end
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    prepare()
    child = 0
    with contextlib.suppress(ConnectionError):  # the owner is gone
        while True:
            command, descriptors, _, _ = socket.recv_fds(end, 64, 1)
            if command == b"spawn":
                child = os.fork()
                if child == 0:
                    end.close()
                    theirs = socket.socket(fileno=descriptors[0])
                    _run_and_exit(partial(serve, theirs, page))
                os.close(descriptors[0])
                end.send(str(child).encode())
            elif command == b"wait":
                end.send(str(os.waitpid(child, 0)[1]).encode())
            else:  # the owner is gone
                break
    if child:
        _end_child(child)


def _end_child(child: int) -> None:
    try:
        if os.waitpid(child, os.WNOHANG)[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    except ChildProcessError:
        pass


def run_jobs(
    work: Work,
    nice: int,
    idle_seconds: Callable[[], float],
    widening: Widening | None,
    measures_memory: bool,
    end: socket.socket,
    page: mmap.mmap,
) -> None:
    """Run the jobs of a process lane, in the process that works."""
    os.nice(nice)
    memory = MemoryPeak() if measures_memory else None
    pacer = Pacer(lambda: _SHARE.unpack_from(page)[0], monotonic_seconds, sleep_seconds, idle_seconds)
    width = Width(widening, lambda: bool(page[_WIDE_AT]), monotonic_seconds)

    def pause() -> None:
        pacer.pause()
        width.next_slice()

    waiting: deque[tuple[str, int, Any]] = deque()
    while True:
        try:
            _take_messages(end, waiting)
        except (EOFError, ConnectionError):  # the owner is gone
            return
        key, number, payload = waiting.popleft()
        _write(page, _CURRENT_AT, _CURRENT.pack(number))
        started = monotonic_seconds()
        width.begin()
        pacer.begin()
        result, failure = None, None
        if memory is not None:
            memory.begin()
        try:
            result = work(payload, pause)
        except Exception as error:  # noqa: BLE001 - any error is reported as the job's
            failure = f"{type(error).__name__}: {error}"
        del payload
        try:
            seconds, peak_bytes = monotonic_seconds() - started + width.end(), 0 if memory is None else memory.end()
            messages.send(end, (key, failure, seconds, peak_bytes), result, wait=True)
        except ConnectionError:  # the owner is gone
            return
        del result
        if memory is not None:
            memory.give_back()
        _write(page, _CURRENT_AT, _CURRENT.pack(0))


def _take_messages(end: socket.socket, waiting: deque[tuple[str, int, Any]]) -> None:
    """Take all messages there are, and wait until there is at least one job."""
    while True:
        message = messages.receive(end, wait=not waiting)
        if message is None:
            return
        (kind, key, number), payload = message
        if kind == "job":
            waiting.append((key, number, payload))
        elif any(job[0] == key for job in waiting):
            remaining = [job for job in waiting if job[0] != key]
            waiting.clear()
            waiting.extend(remaining)
            messages.send(end, (key, None, 0.0, 0), wait=True)
        # otherwise the job is done or running, and its answer is sent in any case
