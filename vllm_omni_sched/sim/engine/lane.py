"""Simulate the encoder beside the steps, and the sequences that wait for it."""

from collections import deque
from collections.abc import Callable, Iterator

from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.requests import LendingView
from vllm_omni_sched.resource.engine.lane import LaneLoad, earliest
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.requests import Sequence
from vllm_omni_sched.sim.kernel import Simulator

Encoded = Callable[[str, int, float, str, int], None]


class _Place:
    """A place that encodes one item at a time.

    ``item``: modality and embeddings of its item; ``whole``: seconds of work that the item needs; ``left``: those that
    were left at ``since``. ``load``: the embeddings that it holds, and its measured speed.
    """

    def __init__(self) -> None:
        self.queue: deque[tuple[str, int, str, int]] = deque()
        self.content: str | None = None
        self.ticket = 0
        self.speed = 1.0
        self.item = "", 0
        self.begun = self.since = self.left = self.whole = self.end = 0.0
        self.turn = 0  # of its planned end; earlier plans are void
        self.load = LaneLoad()


class SimLane:
    """Encodes items, each in one of its places.

    1. An item goes to the place that is expected to finish it first, and stays there (`earliest`, as in `LanePool`).
    2. A place encodes its items in the order in which they came, one at a time.
    3. The last place may depend on processors that others leave: from `slow_last` on it works at that fraction of its
    speed.

    Args:
        places: number of items at a time.
        seconds: returns the seconds of an item from (modality, embeddings).
        encoded: called with the content, the ticket, the seconds, the modality and the embeddings of each encoded item.
    """

    def __init__(self, sim: Simulator, seconds: Callable[[str, int], float], encoded: Encoded, places: int = 1) -> None:
        self._sim, self._seconds, self._encoded = sim, seconds, encoded
        self._places = [_Place() for _ in range(places)]
        self._epoch = 0
        self.working = 0  # items that are being encoded
        self.busy_seconds = 0.0  # of all places together
        self._worked = self._since = 0.0
        self.until = 0.0  # end of the last item that is or was being encoded

    def worked_seconds(self) -> float:
        """Return the seconds so far in which at least one item was being encoded."""
        return self._worked + (self._sim.now - self._since if self.working else 0.0)

    def in_progress(self) -> Iterator[tuple[str, int, float]]:
        """Yield (modality, embeddings, part done) of each item that is being encoded."""
        for place in self._places:
            if place.content is not None and place.whole:
                left = max(place.left - (self._sim.now - place.since) * place.speed, 0.0)
                yield *place.item, 1 - left / place.whole

    def _count(self, items: int) -> None:
        """Change the number of items being encoded."""
        self._worked, self._since = self.worked_seconds(), self._sim.now
        self.working += items

    def submit(self, content: str, ticket: int, modality: str, embeds: int) -> None:
        """Queue an item for encoding."""
        places = self._places
        size = max(1, embeds)
        place = places[0] if len(places) == 1 else places[earliest([one.load for one in places], size)]
        place.load.held += size
        place.queue.append((content, ticket, modality, embeds))
        self._begin(place)

    def forget(self, content: str) -> None:
        """Drop an item that waits to be encoded; one that is being encoded goes on."""
        for place in self._places:
            for one in [one for one in place.queue if one[0] == content]:
                place.queue.remove(one)
                place.load.left(max(1, one[3]))

    def slow_last(self, part: float) -> None:
        """Set the speed of the last place to this fraction, in (0, 1]."""
        place = self._places[-1]
        if part == place.speed:
            return
        if place.content is not None:
            place.left = max(place.left - (self._sim.now - place.since) * place.speed, 0.0)
        place.speed = part
        if place.content is not None:
            self._plan(place)

    def _begin(self, place: _Place) -> None:
        if place.content is not None or not place.queue:
            return
        place.content, place.ticket, modality, embeds = place.queue.popleft()
        place.item = modality, embeds
        place.left = place.whole = self._seconds(modality, embeds)
        place.begun = self._sim.now
        self._count(1)
        self._plan(place)

    def _plan(self, place: _Place) -> None:
        place.turn += 1
        place.since = self._sim.now
        place.end = place.since + place.left / place.speed
        self.until = max(one.end for one in self._places if one.content is not None)
        self._sim.at(place.end, self._end, (self._epoch, place, place.turn))

    def _end(self, planned: tuple[int, _Place, int]) -> None:
        epoch, place, turn = planned
        content = place.content
        if epoch != self._epoch or turn != place.turn or content is None:
            return
        seconds = self._sim.now - place.begun
        self.busy_seconds += seconds
        self._count(-1)
        place.content = None
        ticket, item = place.ticket, place.item
        size = max(1, item[1])
        place.load.left(size)
        place.load.ended(size, seconds)
        self._begin(place)
        self._encoded(content, ticket, seconds, *item)

    def kill(self) -> None:
        """Forget all items."""
        self._epoch += 1
        self._count(-self.working)
        for place in self._places:
            place.queue.clear()
            place.content = None
            place.speed = 1.0
            place.load = LaneLoad()


class Ahead:
    """The lane of a simulated engine, and the sequences that the core holds back for it.

    Args:
        back: called with the sequences to look at again, in the order in which they entered.

    ``decisions``: of the core. ``held``: sequences that wait for the lane, by request id. ``paced``: whether steps may
    be held back in favour of the lane.
    """

    def __init__(
        self,
        sim: Simulator,
        costs: EngineCosts,
        limits: EngineLimits,
        core: EngineCore,
        back: Callable[[list[Sequence]], None],
    ) -> None:
        assert core.ahead is not None
        self._sim, self._costs, self._limits = sim, costs, limits
        self._core, self.decisions, self._back = core, core.ahead, back
        self.paced = limits.paced
        self.view: LendingView | None = None
        self.lane = SimLane(sim, self._seconds, self._encoded, limits.lane_items)
        self.held: dict[str, Sequence] = {}
        self._encoded_seconds = 0.0  # encode time at full width of what the lane has encoded

    @property
    def share(self) -> float:
        """Return the lane's share of the device."""
        return self.decisions.share

    def _seconds(self, modality: str, embeds: int) -> float:
        # processors of its own are not affected by its share of those that steps leave
        runs = self.view is not None and self.view.num_running > 0
        beside = runs and not (self._limits.paced and self._limits.lane_beside)
        return self._costs.lane_seconds(modality, embeds, 1, self.share if beside else 1.0, beside)

    def hold(self, sequence: Sequence) -> None:
        """Hold a sequence that waits for the lane."""
        self.held[sequence.request_id] = sequence

    def send(self) -> None:
        """Submit the items that were decided for the lane, and drop those that no request needs any more."""
        if self._core.lending is not None and self.view is not None:
            self._core.lending.plan(self.view, self._sim.now)
        actions = self.decisions.take_actions()
        for content in actions.forget:
            self.lane.forget(content)
        for content, ticket, modality, embeds in actions.submit:
            self.lane.submit(content, ticket, modality, embeds)

    def _encoded(self, content: str, ticket: int, seconds: float, modality: str, embeds: int) -> None:
        self._encoded_seconds += self._costs.encode_seconds(modality, embeds)
        waited = self.decisions.encoded(content, ticket, seconds, self._sim.now)
        ready = [one for one in waited if one in self.held]
        self.send()
        self._back([self.held.pop(one) for one in self._core.book.in_order(ready)])

    def operations_seconds(self) -> float:
        """Return the encode time at full width of what the lane has encoded so far, running items in proportion."""
        running = sum(
            part * self._costs.encode_seconds(modality, embeds) for modality, embeds, part in self.lane.in_progress()
        )
        return self._encoded_seconds + running

    def kill(self) -> None:
        """Forget all state of an engine that died, with its lane."""
        self.held.clear()
        self.lane.kill()
