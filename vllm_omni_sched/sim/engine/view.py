"""Give the policies of an engine a view of its steps, and apply the effect of the lane."""

from vllm_omni_sched.resource.lane_share import DecodeLoad
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.engine.ahead import Ahead
from vllm_omni_sched.sim.engine.decoding import Decodes
from vllm_omni_sched.sim.engine.encoding import Encoding
from vllm_omni_sched.sim.engine.policies import EnginePolicies
from vllm_omni_sched.sim.engine.prompts import Prompts


class StepView:
    """Reads the engine for the policies, and tells them the times of steps.

    ``ahead``: the scheduler's half of encode-ahead, if there is one.
    """

    __slots__ = ("_beside", "_costs", "_decodes", "_encoding", "_owed", "_policies", "_prompts", "ahead")

    def __init__(
        self, costs: EngineCosts, policies: EnginePolicies, decodes: Decodes, prompts: Prompts, encoding: Encoding
    ) -> None:
        self._costs, self._policies = costs, policies
        self._decodes, self._prompts, self._encoding = decodes, prompts, encoding
        self.ahead: Ahead | None = None
        # of the step beside the lane: the lane's work when it began, how long it was to work meanwhile, and by how
        # much a second of that lengthens the step
        self._beside: tuple[float, float, float] | None = None
        self._owed = 0.0

    def loads(self, target: float | None = None) -> DecodeLoad | None:
        """Those who run, as one class under the tightest of their targets: they all wait for the same steps."""
        decodes, prompts, policies = self._decodes, self._prompts, self._policies
        if not decodes.number and not prompts.running:
            return None
        itl = policies.steps.itl.seconds
        in_step = self.ahead.in_step_seconds if self.ahead is not None else 0.0
        target = min(target or policies.itl_target_seconds, *decodes.targets.counts, *prompts.targets.counts)
        return DecodeLoad(target, None if itl is None else itl + in_step)

    def beside_lane(self, ahead: Ahead, alone: float, now: float) -> tuple[float, float]:
        """Return the seconds of a step beside the lane, and the pause before it.

        The lane may end before the step. If it then gets more work, the step was too short: the missing time is added
        to the next one (`owed_seconds`).

        ``alone``: the step's seconds without the lane.
        """
        decodes, prompts, policies = self._decodes, self._prompts, self._policies
        left = self._costs.in_lane(ahead.share)
        slow = self._costs.step_seconds(decodes.number, decodes.context, prompts.tokens, prompts.pairs, left)
        rest = 0.0
        if policies.pace is not None:
            load = self.loads()
            rest, _ = policies.pace.rest(
                ahead.share,
                policies.steps.predict(prompts.tokens),
                policies.steps.itl.seconds,
                policies.itl_target_seconds if load is None else load.itl_target_seconds,
                encoding=True,
                decoding=load is not None,
            )
        together = ahead.lane.until - now - rest
        if slow > alone:
            planned = min(rest + max(together, 0.0), rest + slow)
            self._beside = ahead.lane.worked_seconds(), planned, 1 - alone / slow
        if together >= slow or slow <= alone:
            return slow, rest
        return max(together, 0.0) + (1 - max(together, 0.0) / slow) * alone, rest

    def unpaid_seconds(self) -> float:
        """Return the seconds by which steps so far, the running one included, were too short."""
        return self._owed + self._short_seconds()

    def _short_seconds(self) -> float:
        """Return by how much the running step is too short, because the lane works for longer than planned."""
        if self._beside is None or self.ahead is None:
            return 0.0
        began, planned, slower = self._beside
        return slower * max(self.ahead.lane.worked_seconds() - began - planned, 0.0)

    def owed_seconds(self) -> float:
        """Return the seconds by which earlier steps were too short, and reset them."""
        owed, self._owed = self._owed, 0.0
        return owed

    def measure(self, now: float, decoding: int, rest_seconds: float) -> None:
        """Record the end of a step in which so many requests decoded."""
        policies, prompts, encoded = self._policies, self._prompts, self._encoding.step
        running, tokens = self._decodes.number + len(prompts.running), prompts.tokens
        seconds = policies.steps.step(now, running, tokens, rest_seconds=rest_seconds, encoded=bool(encoded))
        for modality, (items, embeds) in encoded.items():
            policies.costs.encoded(modality, embeds, self._costs.encode_seconds(modality, embeds, items))
        if seconds is not None:
            if tokens:
                policies.costs.prefilled(tokens, policies.steps.seconds_per_token * tokens)
            if policies.batch is not None:
                policies.batch.observe(seconds, now, decoding + len(prompts.chunks))
            if policies.prefill is not None:
                policies.prefill.observe(seconds, now, tokens)
        if self.ahead is not None:
            self._owed += self._short_seconds()
            self._beside = None
            self.ahead.stepped(now)

    def measure_decodes(self, ends: list[float], running: int) -> None:
        """Record the ends of steps in which so many requests decoded and nothing else happened."""
        policies = self._policies
        step, batch, prefill = policies.steps.step, policies.batch, policies.prefill
        for end in ends:
            seconds = step(end, running, 0)
            if seconds is not None:
                if batch is not None:
                    batch.observe(seconds, end, running)
                if prefill is not None:
                    prefill.observe(seconds, end, 0)
