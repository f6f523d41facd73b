"""A lane that is a process forked from its owner: it shares the owner's memory, but not its interpreter lock."""

import contextlib
import select
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import LaneClosedError, LaneDiedError, LaneError, LaneWorkError
from vllm_omni_sched.lanes import messages
from vllm_omni_sched.lanes.base import (
    CLOSED,
    CLOSED_BEFORE_DONE,
    Done,
    Job,
    Lane,
    Work,
    checked_share,
    held_twice,
    never_idle,
)
from vllm_omni_sched.lanes.fork_server import ForkServer, run_jobs
from vllm_omni_sched.lanes.width import Widening


@dataclass(frozen=True)
class _Sent:
    job: Job
    number: int
    resent: bool = False


class ProcessLane(Lane):
    """Runs jobs in a forked process, which uses this process's weights without a copy.

    Changes in this process after the fork, such as new weights, are visible there after `renew`, which forks anew.
    Payloads and results are pickled; their tensors are copied once into shared memory.

    When the process dies in a job, that job fails, another process is forked from the same state, and the jobs behind
    it continue there; a job that had not begun is tried once more. When no other process can be forked, every method
    except `cancel` and `close` raises `LaneError` from then on, and the held jobs are not reported.

    Linux only. Create it, and renew it, while no other thread of this process computes: one that holds a lock at the
    fork would leave it locked there.

    Args:
        work: as for every lane; the state that it closes over is frozen at the fork.
        capacity: as for every lane.
        nice: added to the process's niceness, so that the owner's threads win the processor.
        idle_seconds: as for `Pacer`; called in the process that works.
        widening: how the work uses more processors while `set_wide` allows that; None if it cannot.
        measures_memory: whether the memory of each job is measured, and given back after it.
    """

    def __init__(
        self,
        work: Work,
        capacity: int = 16,
        *,
        nice: int = 0,
        idle_seconds: Callable[[], float] = never_idle,
        widening: Widening | None = None,
        measures_memory: bool = False,
    ) -> None:
        super().__init__(work, capacity)
        self._serve = partial(run_jobs, work, nice, idle_seconds, widening, measures_memory)
        self._fork_server = ForkServer(self._serve)
        self._jobs: OrderedDict[str, _Sent] = OrderedDict()  # in the order of the process
        self._number = 0
        self._cancelled: set[str] = set()  # cancelled jobs that the process may still answer
        self._ended: list[Done] = []
        self._closed = False
        self._failure: LaneError | None = None
        self._socket: socket.socket = self._fork_server.spawn()

    sees_owner = False

    @property
    def pid(self) -> int:
        """Return the id of the working process."""
        return self._fork_server.pid

    def fileno(self) -> int:
        """Return a descriptor for ``select``, which is readable when `poll` may have a job to report."""
        return self._socket.fileno()

    @property
    def _reads(self) -> bool:
        """Return whether there is a process whose answers are read."""
        return not self._closed

    @property
    def held(self) -> int:
        return len(self._jobs) - len(self._cancelled) + len(self._ended)

    def submit(self, job: Job) -> bool:
        if self._closed:
            raise LaneClosedError(CLOSED)
        if self._failure is not None:
            raise LaneError(str(self._failure))
        if (job.key in self._jobs and job.key not in self._cancelled) or any(d.key == job.key for d in self._ended):
            raise ValueError(held_twice(job.key))
        # A cancelled job may still be running: its key is free again once the process has confirmed the end.
        if self.held >= self.capacity or job.key in self._jobs:
            return False
        self._number += 1
        return self._send(_Sent(job, self._number))

    def _send(self, sent: _Sent) -> bool:
        try:
            messages.send(self._socket, ("job", sent.job.key, sent.number), sent.job.payload)
        except BlockingIOError:
            return False
        except ConnectionError:
            self._read()  # read its last answers, then replace it
            return self._send(sent)
        except OSError as error:
            raise self._break(LaneError(f"sending a job to the encoder process failed: {error}")) from None
        self._jobs[sent.job.key] = sent
        return True

    def _break(self, error: LaneError) -> LaneError:
        """Mark the lane as unusable from now on, and return the error to raise."""
        self._failure = error
        return error

    def cancel(self, key: str) -> bool:
        for i, done in enumerate(self._ended):
            if done.key == key:
                del self._ended[i]
                return True
        if key not in self._jobs or key in self._cancelled:
            return False
        self._cancelled.add(key)
        with contextlib.suppress(OSError):  # without the message it runs the job, and the answer is dropped
            messages.send(self._socket, ("cancel", key, 0))
        return True

    def poll(self) -> list[Done]:
        self._read()
        ended, self._ended = self._ended, []
        return ended

    def _read(self) -> None:
        while self._reads:
            if self._failure is not None:
                raise LaneError(str(self._failure))
            try:
                message = messages.receive(self._socket)
            except EOFError:
                try:
                    self._process_ended()
                except LaneError as error:
                    raise self._break(error) from None
                continue
            except OSError as error:
                raise self._break(LaneError(f"reading a result of the encoder process failed: {error}")) from None
            if message is None:
                return
            (key, failure, seconds, peak_bytes), result = message
            self._finish(key, result, LaneWorkError(failure) if failure is not None else None, seconds, peak_bytes)

    def _finish(self, key: str, result: object, error: LaneError | None, seconds: float, peak_bytes: int = 0) -> None:
        self._jobs.pop(key, None)
        if key in self._cancelled:
            self._cancelled.remove(key)
        else:
            self._ended.append(Done(key, result, error, seconds, peak_bytes))

    def _process_ended(self) -> None:
        """Replace the process after its death: fail the job it was at, and give the other jobs to the new process."""
        how = self._fork_server.end_of_last()
        current_job = self._fork_server.current_job
        self._socket.close()
        self.restarts += 1
        self._socket = self._fork_server.spawn()
        sent, self._jobs = self._jobs, OrderedDict()
        first = next(iter(sent), None)
        for key, job in sent.items():
            # A job that kills a second process before it begins cannot even be unpickled there.
            if job.number == current_job or (not current_job and key == first and job.resent):
                self._finish(key, None, LaneDiedError(f"the encoder process {how} while it worked on this job"), 0.0)
            elif key not in self._cancelled and not self._send(_Sent(job.job, job.number, resent=True)):
                self._finish(
                    key,
                    None,
                    LaneDiedError(f"the encoder process {how}, and the one that replaces it does not accept this job"),
                    0.0,
                )
        self._cancelled.clear()

    def wait(self, timeout: float) -> bool:
        end = monotonic_seconds() + timeout
        while True:
            self._read()
            left = end - monotonic_seconds()
            if self._ended or not self._reads or left <= 0:
                return bool(self._ended)
            select.select([self._socket], [], [], left)

    def set_share(self, share: float) -> None:
        self._fork_server.share = checked_share(share)

    def set_wide(self, wide: bool) -> None:
        """Set whether the lane may use the processors of all lanes, from the next slice of a job on."""
        self._fork_server.wide = wide

    def drain(self, timeout: float) -> bool:
        end = monotonic_seconds() + timeout
        while True:
            self._read()
            left = end - monotonic_seconds()
            if not self._jobs or left <= 0:
                return not self._jobs
            select.select([self._socket], [], [], left)

    def renew(self) -> None:
        if self._closed:
            raise LaneClosedError(CLOSED)
        self._drop_jobs()
        self._socket.close()
        share = self._fork_server.share
        self._fork_server.close(0.0)
        self._failure = None
        self._fork_server = ForkServer(self._serve)
        self._fork_server.share = share
        self._socket = self._fork_server.spawn()

    def _drop_jobs(self) -> None:
        self._jobs.clear()
        self._cancelled.clear()
        self._ended.clear()

    def close(self, timeout: float = 5.0) -> None:
        if self._closed:
            return
        with contextlib.suppress(LaneError):
            self._read()
        self._closed = True
        self._socket.close()
        self._fork_server.close(timeout)
        for key in self._jobs:
            if key not in self._cancelled:
                self._ended.append(Done(key, error=LaneClosedError(CLOSED_BEFORE_DONE)))
        self._jobs.clear()
        self._cancelled.clear()


class MemberLane(ProcessLane):
    """A process lane whose jobs need the lanes of other ranks, which must all be replaced together.

    When its process dies, all held jobs fail with `LaneDiedError`, and `submit` raises it until `replace` or `renew`
    has started another process.

    ``dead``: whether the process has died, and was not replaced yet.
    """

    def __init__(
        self, work: Work, capacity: int = 16, *, nice: int = 0, idle_seconds: Callable[[], float] = never_idle
    ) -> None:
        self.dead = False
        super().__init__(work, capacity, nice=nice, idle_seconds=idle_seconds)

    def renew(self) -> None:
        super().renew()
        self.dead = False

    def replace(self) -> None:
        """Drop all jobs, and replace the process, which is killed if it lives, by one with the same memory.

        Raises:
            LaneClosedError: the lane is closed.
            LaneError: no other process can be forked.
        """
        if self._closed:
            raise LaneClosedError(CLOSED)
        if not self.dead:
            self._fork_server.kill()
            self._fork_server.end_of_last()
            self._socket.close()
        self._drop_jobs()
        self.restarts += 1
        self._socket = self._fork_server.spawn()
        self.dead = False

    def _send(self, sent: _Sent) -> bool:
        if self.dead:
            raise LaneDiedError("the encoder process has ended, and no other one was started yet")
        return super()._send(sent)

    @property
    def _reads(self) -> bool:
        return not (self._closed or self.dead)

    def _process_ended(self) -> None:
        how = self._fork_server.end_of_last()
        self._socket.close()
        self.dead = True
        for key in list(self._jobs):
            self._finish(key, None, LaneDiedError(f"the encoder process {how}"), 0.0)
