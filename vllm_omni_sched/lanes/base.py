"""The interface of all lanes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_omni_sched.errors import LaneError

Pause = Callable[[], None]
"""Called by work between two slices of it: gives the device back for as long as the lane's share asks."""

Work = Callable[[Any, Pause], Any]
"""``work(payload, pause) -> result``."""


@dataclass(frozen=True)
class Job:
    """One piece of work. ``key`` is unique among the jobs that a lane holds."""

    key: str
    payload: Any


@dataclass(frozen=True)
class Done:
    """What became of a job: a result, or an error. ``seconds`` of wall time in the lane, pauses included."""

    key: str
    result: Any = None
    error: LaneError | None = None
    seconds: float = 0.0


class Lane(ABC):
    """Work beside the owner's own.

    1. Jobs are done one at a time, in the order of their `submit`; a `LaneTeam` has several such orders.
    2. Every job accepted is reported by `poll` exactly once, with a result or an error;
       one that was cancelled is not reported at all.
    3. Nothing here blocks but `wait`, `drain` and `close`, and these end by their timeout.
    4. A job that raises, or kills its process, harms no other.

    A lane belongs to one thread: its methods are not to be called from several.

    Args:
        work: what is done with each payload.
        capacity: jobs held at once, waiting and running; `submit` refuses more.

    Raises:
        ValueError: ``capacity`` is below 1.
    """

    def __init__(self, work: Work, capacity: int = 16) -> None:
        if capacity < 1:
            raise ValueError(f"capacity of a lane must be at least 1, got {capacity}")
        self._work = work
        self.capacity = capacity
        self.restarts = 0  # times its process was started again after it died

    @property
    @abstractmethod
    def held(self) -> int:
        """Jobs submitted and neither reported nor cancelled."""

    @abstractmethod
    def submit(self, job: Job) -> bool:
        """Take ``job``; False when the lane is full.

        Raises:
            ValueError: a job with this key is held already.
            LaneClosedError: the lane is closed.
        """

    @abstractmethod
    def cancel(self, key: str) -> bool:
        """Forget a job; it is never reported. False when none with this key is held."""

    @abstractmethod
    def poll(self) -> list[Done]:
        """Jobs that ended since the last call."""

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Until `poll` has something to say, or ``timeout`` seconds; whether it has."""

    @abstractmethod
    def set_share(self, share: float) -> None:
        """Take this part of the device's time from now on, while anything runs; in (0, 1].

        Raises:
            ValueError: outside that range.
        """

    @abstractmethod
    def drain(self, timeout: float) -> bool:
        """Until no job waits or runs, or ``timeout`` seconds; whether it is so. `poll` still reports them."""

    @abstractmethod
    def close(self, timeout: float = 5.0) -> None:
        """End the lane, within about ``timeout`` seconds; `poll` then reports what was held as closed. Idempotent."""


def checked_share(share: float) -> float:
    """``share`` if it is one."""
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share of a lane must be in (0, 1], got {share}")
    return share
