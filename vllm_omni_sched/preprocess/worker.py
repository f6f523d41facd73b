"""The process of the pool that works. It is forked from the server, so it has the model's processor already."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import select
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import UnsupportedValueError
from vllm_omni_sched.heap import keep_freed_memory, return_free_memory, run_on_main_heap
from vllm_omni_sched.lanes.fork_server import threads_of
from vllm_omni_sched.preprocess import messages, values
from vllm_omni_sched.preprocess.messages import Failure
from vllm_omni_sched.video.pool.channel import Channel, close_all

_IDLE_SECONDS = 5.0  # after which free memory is returned
_TEXT = 4096  # characters of an error that are sent


@dataclass(frozen=True)
class WorkerSettings:
    """What every process of a pool is told.

    Attributes:
        work: gets a payload and a function that returns how many threads the job may use at that moment, and returns
            the result; what it raises fails the job.
        memory_bytes: bound on memory beyond what the process has at its start.
        file_bytes: largest result.
    """

    work: Callable[[Any, Callable[[], int]], Any]
    nice: int
    memory_bytes: int
    file_bytes: int


def release_sockets(keep: Callable[[int], bool] = lambda fd: False) -> None:
    """Replace the sockets that this process has inherited, other than those of its own channels.

    Otherwise the server's port would stay taken as long as this process lives. The numbers stay in use, because
    inherited objects may close them.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and fd > 2 and not _is_channel(fd) and not keep(fd):
                os.dup2(null, fd, inheritable=False)
    os.close(null)


def _is_channel(fd: int) -> bool:
    """Return whether a socket is one of those between an owner and its processes; no server uses this kind."""
    with socket.socket(fileno=os.dup(fd)) as end:
        return end.type == socket.SOCK_SEQPACKET


def serve(settings: WorkerSettings, end: socket.socket, page: mmap.mmap) -> None:
    """Do the jobs of the owner, one at a time, until it closes the channel."""
    os.nice(settings.nice)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, settings.file_bytes)
    _limit(resource.RLIMIT_DATA, _data_bytes() + settings.memory_bytes)
    keep_freed_memory()
    run_on_main_heap(partial(_serve, settings, Channel(end, messages.from_owner), partial(threads_of, page)))


def _serve(settings: WorkerSettings, channel: Channel, threads: Callable[[], int]) -> None:
    while True:
        if not select.select([channel], [], [], _IDLE_SECONDS)[0]:
            return_free_memory()
        try:
            received = channel.receive(wait=True)
        except EOFError:
            return
        assert received is not None
        message, fds = received
        out: list[int] = []
        try:
            answer = _answer(settings, message, fds, out, threads)
            channel.send(answer, out, wait=True)
        except OSError:  # the owner has closed the channel
            return
        finally:
            close_all([*fds, *out])


def _answer(
    settings: WorkerSettings, message: messages.Work, fds: list[int], out: list[int], threads: Callable[[], int]
) -> Any:
    began, task = monotonic_seconds(), message.task
    try:
        payload = values.decode(message.tree, values.map_sealed(fds[0], 1 << 62))
        result = values.encode(settings.work(payload, threads))
        if result.nbytes > settings.file_bytes:
            raise MemoryError(f"the result has {result.nbytes} bytes, and max_bytes is {settings.file_bytes}")
        out.append(values.sealed_file(result))
        return messages.Done(task, result.tree, monotonic_seconds() - began)
    except UnsupportedValueError as error:
        return messages.Failed(task, Failure.UNSUPPORTED, str(error)[:_TEXT])
    except ValueError as error:
        return messages.Failed(task, Failure.INPUT, str(error)[:_TEXT])
    except MemoryError as error:
        return messages.Failed(task, Failure.MEMORY, str(error)[:_TEXT])
    except Exception as error:  # noqa: BLE001 - any error is reported to the owner
        return messages.Failed(task, Failure.INTERNAL, f"{type(error).__name__}: {error}"[:_TEXT])


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def _data_bytes() -> int:
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["VmData"].split()[0]) << 10
