"""Show the state of a simulated engine to its core, and apply the effect of the lane to its steps."""

from collections.abc import Sequence as Many

from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.requests import Decodes, KvBlocks
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.engine.lane import Ahead
from vllm_omni_sched.sim.engine.prompts import Encoding, Prompts
from vllm_omni_sched.sim.engine.requests import DecodingSequences, Sequence, Waiting
from vllm_omni_sched.sim.kernel import Simulator


class StepView:
    """The `EngineView` of a simulated engine; reports the times of its steps to the core.

    ``ahead``: its lane, if there is one.
    """

    def __init__(
        self,
        sim: Simulator,
        costs: EngineCosts,
        core: EngineCore,
        waiting: Waiting,
        decodes: DecodingSequences,
        prompts: Prompts,
        encoding: Encoding,
    ) -> None:
        self._sim, self._costs, self._core, self._waiting = sim, costs, core, waiting
        self._decodes, self._prompts, self._encoding = decodes, prompts, encoding
        self.has_encoding = encoding.has
        self.ahead: Ahead | None = None
        # of the step beside the lane: the lane's work when it began, how long it was to work meanwhile, and by how
        # much a second of that lengthens the step
        self._beside: tuple[float, float, float] | None = None
        self._owed = 0.0

    # -- for the core --------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Return the number of admitted requests."""
        return self._decodes.number + len(self._prompts.running)

    @property
    def num_requests(self) -> int:
        """Return the number of requests in the engine."""
        held = len(self.ahead.held) if self.ahead is not None else 0
        return self.num_running + len(self._waiting.sequences) + held

    @property
    def decode_tokens(self) -> int:
        """Return the tokens that decoding requests need in a step."""
        return self._decodes.number

    @property
    def free_embeds(self) -> int:
        """Return the room in the encoder cache after all possible evictions."""
        return self._encoding.free_embeds

    def least_itl(self) -> float | None:
        """Return the least inter-token-latency target of running requests; None if none runs."""
        decodes, prompts = self._decodes.targets, self._prompts.targets
        if decodes.counts or prompts.counts:
            return decodes.least if decodes.least <= prompts.least else prompts.least
        return None

    def decodes(self) -> Decodes:
        """Return the decoding requests."""
        decodes, unharmed, broken = self._decodes, 0, 0
        for sequence in decodes.sequences.values():
            gap = max(sequence.largest_gap, decodes.largest_since(sequence.first_step))
            if gap > sequence.sla.itl_seconds:
                broken += 1
            else:
                unharmed += 1
        return Decodes(unharmed, broken, decodes.targets.least)

    def prompts(self) -> Many[Sequence]:
        """Return the running requests whose prompt is being computed."""
        return self._prompts.running

    def waiting(self, count: int) -> Many[Sequence]:
        """Return the first waiting requests, at most ``count``."""
        return self._waiting.first(count, self._sim.now)

    def kv_blocks(self) -> KvBlocks:
        """Return the KV cache in blocks of one token."""
        prompts = self._prompts
        left = sum([one.left for one in prompts.running])
        free, running = max(prompts.kv_room - prompts.kv_tokens, 0), self.num_running
        first = self._waiting.peek(self._sim.now) if prompts.room() else None
        if first is None:
            return KvBlocks(free, left, running)
        return KvBlocks(free, left, running, first, first.prompt, not prompts.fits(first))

    # -- the lane ------------------------------------------------------------

    def beside_lane(self, ahead: Ahead, alone: float, now: float) -> tuple[float, float]:
        """Return the seconds of a step beside the lane, and the pause before it.

        The lane may end before the step. If it then gets more work, the step was too short: the missing time is added
        to the next one (`owed_seconds`).

        ``alone``: the step's seconds without the lane.
        """
        decodes, prompts = self._decodes, self._prompts
        left = self._costs.in_lane(ahead.decisions.share)
        slow = self._costs.step_seconds(decodes.number, decodes.context, prompts.tokens, prompts.pairs, left)
        rest = ahead.decisions.rest_seconds(self, prompts.tokens) if ahead.paced else 0.0
        until_end = ahead.lane.until - now - rest
        together = until_end if until_end > 0.0 else 0.0
        if slow > alone:
            planned = rest + (together if together < slow else slow)
            self._beside = ahead.lane.worked_seconds(), planned, 1 - alone / slow
        if until_end >= slow or slow <= alone:
            return slow, rest
        return together + (1 - together / slow) * alone, rest

    def unpaid_seconds(self) -> float:
        """Return the seconds by which steps so far, the running one included, were too short."""
        return self._owed + self._short_seconds()

    def _short_seconds(self) -> float:
        """Return by how much the running step is too short, because the lane works for longer than planned."""
        if self._beside is None or self.ahead is None:
            return 0.0
        began, planned, slower = self._beside
        longer = self.ahead.lane.worked_seconds() - began - planned
        return slower * longer if longer > 0.0 else 0.0

    def owed_seconds(self) -> float:
        """Return the seconds by which earlier steps were too short, and reset them."""
        owed, self._owed = self._owed, 0.0
        return owed

    def _pass_beside(self) -> None:
        """Note by how much the step that has ended was too short."""
        self._owed += self._short_seconds()
        self._beside = None

    # -- step times ----------------------------------------------------------

    def measure_decodes(self, now: float, decoding: int, rest_seconds: float) -> None:
        """Report the end of a step in which so many requests decoded, and nothing else happened in the LLM."""
        if self._beside is not None:
            self._pass_beside()
        number = self._decodes.number
        self._core.step_ended(
            self, now, num_running=number, num_requests=decoding, prompt_tokens=0, rest_seconds=rest_seconds
        )

    def measure(self, now: float, decoding: int, rest_seconds: float) -> None:
        """Report the end of a step in which so many requests decoded."""
        prompts, costs = self._prompts, self._costs
        encodes = None
        if encoded := self._encoding.step:
            encodes = {
                modality: (embeds, costs.encode_seconds(modality, embeds, items))
                for modality, (items, embeds) in encoded.items()
            }
        if self._beside is not None:
            self._pass_beside()
        self._core.step_ended(
            self,
            now,
            num_running=self._decodes.number + len(prompts.running),
            num_requests=decoding + len(prompts.chunks),
            prompt_tokens=prompts.tokens,
            rest_seconds=rest_seconds,
            encodes=encodes,
        )
