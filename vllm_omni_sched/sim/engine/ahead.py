"""Model the scheduler's half of encode-ahead: which items go to the lane, and which requests wait for them."""

from collections.abc import Callable
from typing import Protocol

from vllm_omni_sched.items.ahead import LEAST_PIECE, AheadLedger, EncodeState
from vllm_omni_sched.resource.lane_share import DecodeLoad, LaneShare
from vllm_omni_sched.resource.share import EncodeShare, Where, WhereReason
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.engine.encoding import Encoding
from vllm_omni_sched.sim.engine.lane import SimLane
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.policies import EnginePolicies
from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.kernel import Simulator


class Loads(Protocol):
    """Function that returns the decoding requests; ``target``: latency target in place of `itl_target_ms`."""

    def __call__(self, target: float | None = None) -> DecodeLoad | None: ...


class Ahead:
    """Asks `EncodeShare` where the items of a sequence's next chunk are encoded, as the real scheduler does.

    1. While its items are in the lane, a sequence is held, unless a piece of its prompt before them is worth a
       step; when an item is back, the sequence is checked again.
    2. A sequence that once had items in the lane has none encoded in the step.
    3. Each content is encoded once for all requests that need it (`AheadLedger`).

    Args:
        running: returns the decoding requests for the lane's share.
        back: called with the sequences that are no longer held.
    """

    def __init__(
        self,
        sim: Simulator,
        costs: EngineCosts,
        limits: EngineLimits,
        policies: EnginePolicies,
        encoding: Encoding,
        running: Loads,
        back: Callable[[list[Sequence]], None],
    ) -> None:
        assert policies.share is not None
        assert policies.lane_share is not None
        assert policies.ledger is not None
        self._sim, self._costs, self._limits, self._policies = sim, costs, limits, policies
        self._encoding, self._running, self._back = encoding, running, back
        self.policy: EncodeShare = policies.share
        self._lane_share: LaneShare = policies.lane_share
        self.ledger: AheadLedger = policies.ledger
        self.share = 1.0
        self.lane = SimLane(sim, self._seconds, self._encoded, limits.lane_items)
        self.held: dict[str, Sequence] = {}
        self._wanted: dict[str, tuple[str, int, set[str]]] = {}  # content -> modality, embeddings, who is held for it
        self._anybody = DecodeLoad(policies.itl_target_seconds)
        self.placements: dict[tuple[Where, WhereReason], int] = {}  # groups of items that went there for that reason
        self.in_step_seconds = 0.0  # of encodes in the step that is being planned
        self._encoded_seconds = 0.0  # encode time at full width of what the lane has encoded

    def _seconds(self, modality: str, embeds: int) -> float:
        # processors of its own are not affected by its share of those that steps leave
        beside = bool(self._running()) and not (self._limits.paced and self._limits.lane_beside)
        return self._costs.lane_seconds(modality, embeds, 1, self.share if beside else 1.0, beside)

    def may_run(self, sequence: Sequence, alone: bool) -> bool:
        """Whether its next chunk has what it needs, or a piece of it that is worth a step (``sequence.limit``).

        Args:
            alone: no other request is in the engine.
        """
        sequence.limit = None
        window = sequence.window(self._limits.max_num_batched_tokens)
        missing = [
            i
            for i in window
            if sequence.items[i].content not in sequence.held and not self._encoding.has(sequence.items[i])
        ]
        if not missing or (not sequence.ahead and self._in_step(sequence, missing, alone)):
            return True
        sequence.ahead = True
        for i in missing:
            item = sequence.items[i]
            content = str(item.content)
            if self.ledger.want(sequence.name, content, item.embeds) is not EncodeState.READY:
                self._wanted.setdefault(content, (item.modality, item.embeds, set()))[2].add(sequence.name)
        sequence.limit = sequence.starts[missing[0]]
        return sequence.limit - sequence.computed >= LEAST_PIECE

    def _in_step(self, sequence: Sequence, missing: list[int], alone: bool) -> bool:
        items = [sequence.items[i] for i in missing]
        if any(self.ledger.state(str(item.content)) is not None for item in items):
            return False
        seconds = sum(self._policies.costs.encode_seconds(item.modality, item.embeds) for item in items)
        seconds = seconds or len(items) * self._policies.itl_target_seconds
        others = None if alone else self._running() or self._anybody
        placed = self.policy.place(others, seconds)
        decided = placed.where, placed.reason
        self.placements[decided] = self.placements.get(decided, 0) + 1
        in_step = placed.where is Where.IN_STEP
        self.in_step_seconds += seconds if in_step else 0.0
        return in_step

    def hold(self, sequence: Sequence) -> None:
        """Hold a sequence that waits for the lane."""
        self.held[sequence.name] = sequence

    def send(self) -> None:
        """Submit the items that were decided for the lane."""
        if not self.ledger.num_pending and not self.ledger.has_orders:
            return
        for content, ticket in self.ledger.take_orders().submit:
            modality, embeds, _ = self._wanted[content]
            self.lane.submit(content, ticket, modality, embeds)

    def _encoded(self, content: str, ticket: int, seconds: float) -> None:
        modality, embeds, waiting = self._wanted.pop(content, ("", 0, set()))
        if modality:
            self._policies.costs.encoded(modality, embeds, seconds)
            self._encoded_seconds += self._costs.encode_seconds(modality, embeds)
        self.ledger.ready(content, ticket)
        self.send()
        self._back([self.held.pop(name) for name in sorted(waiting, key=int) if name in self.held])

    def operations_seconds(self) -> float:
        """Return the encode time at full width of what the lane has encoded so far, running items in proportion."""
        running = sum(
            part * self._costs.encode_seconds(modality, embeds) for modality, embeds, part in self.lane.in_progress()
        )
        return self._encoded_seconds + running

    def stepped(self, now: float) -> None:
        """Update the lane's share by the time of a step that has ended."""
        self.in_step_seconds = 0.0
        if self.ledger.num_pending:
            self.share, _ = self._lane_share.update(self._running(self._policies.share_target_seconds), now)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self.held.pop(sequence.name, None)
        self.ledger.release(sequence.name)
        for item in sequence.items if sequence.ahead else ():
            if self.ledger.state(str(item.content)) is None:
                self._wanted.pop(str(item.content), None)

    def kill(self) -> None:
        """Forget all state of an engine that died, with its lane."""
        for sequence in list(self.held.values()):
            self.release(sequence)
        self.lane.kill()
        self._wanted.clear()
