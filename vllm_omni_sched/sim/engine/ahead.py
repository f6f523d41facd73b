"""Carry out the actions of encode-ahead in the simulator: run the lane, and hold sequences that wait for it."""

from collections.abc import Callable

from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.requests import LendingView
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.engine.lane import SimLane
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.kernel import Simulator


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
