"""The interface of all lanes, and the duty cycle of those that rest between slices of work."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_omni_sched.config.errors import LaneError

Pause = Callable[[], None]
"""Called by work between two of its slices: yields the device for as long as the lane's share requires."""

Work = Callable[[Any, Pause], Any]
"""``work(payload, pause) -> result``."""


_MAX_REST_SECONDS = 1.0  # after one slice


CLOSED = "the encoder lane was closed, and accepts no more jobs"
CLOSED_BEFORE_DONE = "the encoder lane was closed before this job was done"


@dataclass(frozen=True)
class Job:
    """One piece of work; ``key`` is unique among the jobs that a lane holds.

    ``size``: amount of work relative to other jobs, above 0, such as the number of embeddings to make.
    """

    key: str
    payload: Any
    size: float = 1.0


@dataclass(frozen=True)
class Done:
    """The outcome of a job: a result or an error, and the wall time in the lane in ``seconds``, pauses included.

    Time on more processors than the lane's own counts by their number. ``peak_bytes``: memory that the process of the
    lane had at most beyond what it had before the job; 0 if it was not measured.
    """

    key: str
    result: Any = None
    error: LaneError | None = None
    seconds: float = 0.0
    peak_bytes: int = 0


class Lane(ABC):
    """Runs jobs beside the work of its owner.

    1. Jobs run one at a time, in the order of their `submit`; a `LanePool` runs several such sequences.
    2. `poll` reports every accepted job exactly once, with a result or an error; a cancelled job is never reported.
    3. Only `wait`, `drain`, `close` and `renew` block; the first three end by their timeout.
    4. A job that raises, or kills its process, does not affect other jobs.

    A lane belongs to one thread: do not call its methods from several threads.

    Args:
        work: the function to run on each payload.
        capacity: most jobs held at once, waiting and running; `submit` refuses more.

    Raises:
        ValueError: ``capacity`` is below 1.

    ``sees_owner``: whether jobs see what the owner has changed in its memory since the lane was made.
    """

    sees_owner = True

    def __init__(self, work: Work, capacity: int = 16) -> None:
        if capacity < 1:
            raise ValueError(f"capacity of an encoder lane must be at least 1, got {capacity}")
        self._work = work
        self.capacity = capacity
        self.llm_idle = False
        self.restarts = 0  # number of times that the lane's process died and was replaced

    @property
    @abstractmethod
    def held(self) -> int:
        """Return the number of jobs that are submitted and neither reported nor cancelled."""

    @abstractmethod
    def submit(self, job: Job) -> bool:
        """Accept ``job``; return False if the lane is full.

        Raises:
            ValueError: a job with this key is held already.
            LaneClosedError: the lane is closed.
        """

    @abstractmethod
    def cancel(self, key: str) -> bool:
        """Drop a job, which is then never reported; return False if no job with this key is held."""

    @abstractmethod
    def poll(self) -> list[Done]:
        """Return the jobs that ended since the last call."""

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until `poll` has a job to report; return whether it has one."""

    @abstractmethod
    def set_share(self, share: float) -> None:
        """Set the share of the device's time that the lane uses while it works, in (0, 1].

        Raises:
            ValueError: ``share`` is outside that range.
        """

    def set_llm_idle(self, idle: bool) -> None:
        """Record whether the LLM computes nothing until the next call, so that its processors may be used, too."""
        self.llm_idle = idle

    @abstractmethod
    def drain(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until no job waits or runs; return whether that is so. `poll` still reports
        them.
        """

    @abstractmethod
    def renew(self) -> None:
        """Drop all jobs, which are not reported, and run later ones with the present memory of the owner.

        When this returns, no dropped job runs any more.

        Raises:
            LaneError: the lane can run no further jobs.
        """

    @abstractmethod
    def close(self, timeout: float = 5.0) -> None:
        """End the lane, within about ``timeout`` seconds; `poll` then reports the jobs it held as closed.
        Idempotent.
        """


def held_twice(key: str) -> str:
    """Return the error for a job whose key another job of the lane has."""
    return f"the encoder lane holds a job with the key {key!r} already"


def checked_share(share: float) -> float:
    """Return ``share`` if it is in (0, 1].

    Raises:
        ValueError: it is outside that range.
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share of an encoder lane must be in (0, 1], got {share}")
    return share


def no_pause() -> None:
    """Return at once: work that runs where its owner waits for it yields to nobody."""


def never_idle() -> float:
    """Return the idle seconds of work that waits for nobody: 0."""
    return 0.0


class Pacer:
    """Rests between slices of work, so that work takes ``share()`` of the time.

    Args:
        share: returns the current share, in (0, 1].
        now: monotonic seconds.
        sleep: sleeps for that many seconds.
        idle_seconds: returns for how many seconds, in all, the work has waited for others; they count neither as work
            nor as rest. Otherwise two lanes that wait for each other would rest longer and longer.
    """

    def __init__(
        self,
        share: Callable[[], float],
        now: Callable[[], float],
        sleep: Callable[[float], object],
        idle_seconds: Callable[[], float] = never_idle,
    ) -> None:
        self._share = share
        self._now = now
        self._sleep = sleep
        self._idle_seconds = idle_seconds
        self._since = self._time()

    def _time(self) -> float:
        return self._now() - self._idle_seconds()

    def begin(self) -> None:
        """Start a job: time until now does not count as work."""
        self._since = self._time()

    def pause(self) -> None:
        """End a slice; the next one begins when this returns."""
        worked = self._time() - self._since
        share = self._share()
        if share < 1.0 and worked > 0.0:
            self._sleep(min(_MAX_REST_SECONDS, worked * (1.0 / share - 1.0)))
        self._since = self._time()
