"""Long work in slices: batches in which short work is done soon, and long work goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.errors import ConfigError


class BatchReason(str, Enum):
    """What limited the batch."""

    NOTHING_WAITS = "nothing_waits"
    ALL_LEFT = "all_left"  # nothing: it holds all that is left of everybody
    WINDOWS = "windows"  # the slices: they have not grown further yet
    TARGET = "target"  # the latency target
    MEMBERS = "members"  # it has as many as it may, and somebody else waits
    OVER_TARGET = "over_target"  # one unit alone takes longer than the target


@dataclass(frozen=True)
class Work:
    """What is left of a request, in units that cannot be cut: tokens, or denoising steps.

    ``first_units``: its first slice, and what slices grow by once they no longer double.

    Raises:
        ValueError: a number is out of its range.
    """

    request_id: str
    units: int
    seconds_per_unit: float
    first_units: int = 1

    def __post_init__(self) -> None:
        if self.units < 1 or self.first_units < 1:
            raise ValueError(f"request {self.request_id!r}: units and first_units must be 1 or more")
        if not 0 <= self.seconds_per_unit < math.inf:
            raise ValueError(f"request {self.request_id!r}: seconds_per_unit must be finite and >= 0")

    @classmethod
    def of_text(cls, request_id: str, tokens: int, seconds_per_token: float, first_tokens: int = 64) -> Work:
        """A long text, in chunks of tokens."""
        return cls(request_id, tokens, seconds_per_token, first_tokens)

    @classmethod
    def of_image(cls, request_id: str, steps: int, pixels: int, seconds_per_pixel_step: float) -> Work:
        """A picture or video by diffusion: what a step costs is in proportion to its pixels."""
        return cls(request_id, steps, pixels * seconds_per_pixel_step)


@dataclass(frozen=True)
class Slice:
    """So many units of a request."""

    request_id: str
    units: int


@dataclass(frozen=True)
class Batch:
    """Slices to run together, what that should take, and what limited them."""

    members: tuple[Slice, ...]
    estimated_seconds: float
    target_seconds: float
    reason: BatchReason


@dataclass
class _Window:
    """How large the slices of a request may be."""

    units: int
    step: int
    served: int  # number of its last slice, or of the last one when it came
    doubles: bool = True


class ProgressiveBatcher:
    """Forms batches that take about ``target_seconds``.

    1. A batch should take ``base_seconds`` + units x seconds per unit of all its slices, times how much longer
       batches took lately than they should have.
    2. First everybody gets a first slice, who waited for the most batches first; then slices grow up to their
       windows, those with least left first. So short work is done soon.
    3. The estimate stays within the target. Who is first gets one unit even if that alone takes longer.
    4. A batch within the target lets the windows that it used up grow: they double, until a batch took too long;
       after that they grow by a first slice. A batch over the target halves the windows of its members
       (slow start, and additive increase, multiplicative decrease; Chiu and Jain, 1989).
    5. A batch serves at least who waited longest: of n requests, each goes on in every n-th batch at the latest, and
       in every batch as long as all first slices fit.

    Args:
        base_seconds: what a batch takes before its first unit.
        max_members: of a batch.

    Raises:
        ConfigError: an argument is out of range.
    """

    _MOST_SLOWER = 8.0  # a hiccup must not shrink batches for long

    def __init__(self, base_seconds: float = 0.0, max_members: int = 32) -> None:
        if not 0 <= base_seconds < math.inf:
            raise ConfigError(f"base_seconds must be finite and >= 0, got {base_seconds}")
        if max_members < 1:
            raise ConfigError(f"max_members must be 1 or more, got {max_members}")
        self.base_seconds = base_seconds
        self.max_members = max_members
        self.slower = 1.0
        self._windows: dict[str, _Window] = {}
        self._number = 0

    def window(self, request_id: str) -> int | None:
        """The largest slice that the request may get now; None if it was in no plan."""
        window = self._windows.get(request_id)
        return None if window is None else window.units

    def plan(self, waiting: Sequence[Work], target_seconds: float) -> Batch:
        """The next batch. Who is no longer among ``waiting`` is forgotten.

        Raises:
            ValueError: the target is not above 0, or two have the same id.
        """
        if not 0 < target_seconds < math.inf:
            raise ValueError(f"target_seconds must be above 0, got {target_seconds}")
        works = {work.request_id: work for work in waiting}
        if len(works) < len(waiting):
            raise ValueError("each waiting request must have its own request_id")
        self._note(waiting)
        if not waiting:
            return Batch((), 0.0, target_seconds, BatchReason.NOTHING_WAITS)
        left = target_seconds / self.slower - self.base_seconds
        units: dict[str, int] = {}
        limited = False
        for work in sorted(waiting, key=lambda work: self._windows[work.request_id].served):
            if len(units) == self.max_members:
                break
            wanted = min(work.first_units, work.units, self._windows[work.request_id].units)
            given = _affordable(wanted, work.seconds_per_unit, left)
            limited = limited or given < wanted
            if given or not units:
                units[work.request_id] = max(given, 1)
                left -= max(given, 1) * work.seconds_per_unit
        for work in sorted((works[name] for name in units), key=lambda work: work.units * work.seconds_per_unit):
            more = min(work.units, self._windows[work.request_id].units) - units[work.request_id]
            given = _affordable(more, work.seconds_per_unit, left)
            limited = limited or given < more
            units[work.request_id] += given
            left -= given * work.seconds_per_unit
        for name in units:
            self._number += 1
            self._windows[name].served = self._number
        seconds = self.base_seconds + math.fsum(number * works[name].seconds_per_unit for name, number in units.items())
        members = tuple(Slice(name, number) for name, number in units.items())
        reason = BatchReason.WINDOWS
        if seconds * self.slower > target_seconds * (1 + 1e-9):
            reason = BatchReason.OVER_TARGET
        elif units == {work.request_id: work.units for work in waiting}:
            reason = BatchReason.ALL_LEFT
        elif limited:
            reason = BatchReason.TARGET
        elif len(units) < len(waiting):
            reason = BatchReason.MEMBERS
        return Batch(members, seconds * self.slower, target_seconds, reason)

    def observe(self, batch: Batch, seconds: float) -> None:
        """The batch has run, and took so long: rule 4.

        Raises:
            ValueError: ``seconds`` is negative or not finite.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be finite and >= 0, got {seconds}")
        if batch.estimated_seconds > 0:
            ratio = seconds / batch.estimated_seconds * self.slower
            ratio = min(max(ratio, 1 / self._MOST_SLOWER), self._MOST_SLOWER)
            self.slower += 0.2 * (ratio - self.slower)
        over = seconds > batch.target_seconds
        for member in batch.members:
            window = self._windows.get(member.request_id)
            if window is None:
                continue
            if over:
                window.units, window.doubles = max(min(window.units, member.units) // 2, 1), False
            elif member.units >= window.units:
                window.units += window.units if window.doubles else window.step

    def _note(self, waiting: Sequence[Work]) -> None:
        names = {work.request_id for work in waiting}
        for name in [name for name in self._windows if name not in names]:
            del self._windows[name]
        for work in waiting:
            if work.request_id not in self._windows:
                self._windows[work.request_id] = _Window(work.first_units, work.first_units, self._number)


def _affordable(units: int, seconds_per_unit: float, seconds: float) -> int:
    """How many of the units fit into the seconds."""
    seconds = max(seconds, 0.0)
    if units * seconds_per_unit <= seconds:
        return units
    return int(min(units, seconds / seconds_per_unit))
