"""The engine: what happens when."""

from typing import Protocol

from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.engine.ahead import Ahead
from vllm_omni_sched.sim.engine.decoding import Decodes
from vllm_omni_sched.sim.engine.encoding import Encoding
from vllm_omni_sched.sim.engine.front import FrontEnd
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.policies import EnginePolicies
from vllm_omni_sched.sim.engine.prompts import Prompts
from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.engine.view import StepView
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.server import Done, Job

_BESIDE_STEPS = 0.1  # of a processor, for a process of niceness 10 (`encode_lane_nice`) beside one of 0


class Watcher(Protocol):
    """Is told of each step, for a trace."""

    def __call__(self, name: str, start: float, seconds: float, **facts: float) -> None: ...


class EngineServer(FrontEnd):
    """A vLLM engine on its device or devices.

    1. A request first goes through the front end, which serves one at a time, then it waits.
    2. A step: those who decode make a token each, prompts are computed (`Prompts`), items are encoded in front of
       that (`Encoding`). The next one begins when it ends.
    3. With ``encode_ahead`` items are encoded in a lane meanwhile (`Ahead`); then the LLM has what the lane leaves.
       Where the lane has processors of its own and a place on the LLM's, that place has what steps leave it.
    4. Where those who decode have no KV memory left, the one that was let in last gives back all that it has and
       waits again; what it had is computed anew.

    What is left out: prefix caching, speculative decoding, and the time by which a step is scheduled ahead of the one
    before it (async scheduling), which the costs of a step contain.

    Args:
        done: called with each job when its client has its last token.
        itl: takes the time between tokens of every request.
        spoke: called with each job when it has its first token.

    ``steps``: that began. ``preempted``: how often rule 4 was needed.
    """

    __slots__ = (
        "_encode_seconds",
        "_gap",
        "_idle_since",
        "_itl",
        "_lane_seconds",
        "_lane_shares",
        "_last_end",
        "_llm_seconds",
        "_may_be_plain",
        "_measures",
        "_plain",
        "_policies",
        "_rest",
        "_run",
        "_spoke",
        "_step_seconds",
        "_stepping",
        "_view",
        "_watcher",
        "ahead",
        "decodes",
        "encoding",
        "preempted",
        "prompts",
        "waiting",
    )

    def __init__(
        self,
        sim: Simulator,
        costs: EngineCosts,
        limits: EngineLimits,
        policies: EnginePolicies,
        done: Done,
        itl: Histogram,
        watcher: Watcher | None = None,
        spoke: Done | None = None,
    ) -> None:
        super().__init__(sim, costs, limits.kv_tokens, done)
        self._policies = policies
        self._itl, self._watcher, self._spoke = itl, watcher, spoke
        self.waiting = policies.waiting()
        self.decodes = Decodes()
        self.encoding = Encoding(limits, policies)
        self.prompts = Prompts(limits, policies, self.waiting, self.decodes, self.encoding)
        self._view = StepView(costs, policies, self.decodes, self.prompts, self.encoding)
        self.ahead: Ahead | None = None
        if policies.share is not None:
            self.ahead = Ahead(sim, costs, limits, policies, self.encoding, self._view.loads, self._come_back)
            self.prompts.ahead = self._view.ahead = self.ahead
        # a lane with processors of its own, and a place on the LLM's
        self._lane_shares = self.ahead is not None and limits.paced and limits.lane_beside and limits.lane_items > 1
        self.preempted = 0
        self._stepping = False
        self._last_end = 0.0
        self._rest = 0.0
        self._llm_seconds = self._encode_seconds = self._lane_seconds = 0.0
        self._idle_since = 0.0
        self._measures = policies.measures
        self._may_be_plain = watcher is None and not self._lane_shares
        self._plain = False  # nobody waits, and no prompt is computed: the next step is as this one
        # as each step looks at them
        self._step_seconds, self._gap = costs.step_seconds, itl.add
        self._run = sim.soon  # a step

    # -- what it is told ---------------------------------------------------

    def _enter(self, came: tuple[int, Job]) -> None:
        epoch, job = came
        if not self._is_here(epoch, job):
            return
        sequence = Sequence(job, self._policies.sla(job.request.sla), self._sim.now)
        self._jobs[job.request.number] = (job, sequence)
        self.waiting.push(sequence, self._sim.now)
        self._plain = False
        self._wake()

    def abort(self, job: Job) -> None:
        """Forget a job; nothing if it is not here."""
        sequence = self._leave(job) if self._is_here(self._epoch, job) else None
        if sequence is None:
            return
        if sequence.name in self.decodes.sequences:
            self.decodes.remove(sequence)
        elif sequence in self.prompts.running:
            self.prompts.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._forget(sequence)

    def kill(self) -> list[Job]:
        """Die."""
        lost = self._die()
        if self.ahead is not None:
            self.ahead.kill()
            for sequence in self.prompts.running:
                self.ahead.ledger.release(sequence.name)
        for sequence in self.waiting.first(len(self.waiting.sequences), self._sim.now):
            self.waiting.remove(sequence)
            if self.ahead is not None:
                self.ahead.ledger.release(sequence.name)
        for sequence in list(self.decodes.sequences.values()):
            self.decodes.remove(sequence)
        self.prompts.forget()
        self.encoding.clear()
        self._stepping = self._plain = False
        return lost

    def busy_seconds(self) -> dict[str, float]:
        """Seconds of steps by what they went to, and those of the lane in which no step ran."""
        busy = {"llm": self._llm_seconds, "encode": self._encode_seconds}
        if self.ahead is not None:
            busy["lane"] = self._lane_seconds
        return busy

    # -- steps -------------------------------------------------------------

    def _wake(self) -> None:
        """Begin a step, after all that happens at this time."""
        if not self._stepping:
            self._stepping = True
            if self.ahead is not None:
                lane = min(self.ahead.lane.until, self._sim.now) - self._idle_since
                self._lane_seconds += lane if lane > 0 else 0.0
            self._sim.soon(0.0, self._woken, self._epoch)

    def _woken(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._begin()

    def _begin(self) -> None:
        decodes, prompts, sim = self.decodes, self.prompts, self._sim
        decoding = decodes.number
        if decodes.context + prompts.computed + decoding > self._kv_tokens:
            decoding = self._make_room()
        encode = 0.0
        if prompts.running or (self.waiting.sequences and prompts.room()):
            prompts.plan(sim.now)
            for modality, (items, embeds) in self.encoding.step.items():
                encode += self._costs.encode_seconds(modality, embeds, items)
            if self.ahead is not None:
                self.ahead.send()
        elif prompts.chunks:
            prompts.clear()
            self.encoding.begin()
        tokens = prompts.tokens
        self._plain = self._may_be_plain and not (prompts.running or prompts.chunks or self.waiting.sequences)
        if not decoding and not tokens:
            self._stepping = False
            self._idle_since = sim.now
            if self._lane_shares:
                self.ahead.lane.slow_last(1.0)  # type: ignore[union-attr]
            return
        seconds = self._step_seconds(decoding, decodes.context, tokens, prompts.pairs)
        if self.ahead is not None:
            self._rest = 0.0
            if self.ahead.lane.working:
                seconds, self._rest = self._view.beside_lane(self.ahead, seconds, sim.now)
        self._llm_seconds += seconds
        if encode:
            self._encode_seconds += encode
            seconds += encode
        if self._rest:
            seconds += self._rest
        if self._watcher is not None:
            facts = {"decodes": decoding, "prefill_tokens": tokens, "encode_seconds": encode}
            self._watcher("step", sim.now, seconds, **facts)
        if self._lane_shares and seconds:
            left = (self._rest + _BESIDE_STEPS * (seconds - self._rest)) / seconds
            self.ahead.lane.slow_last(left)  # type: ignore[union-attr]
        self._run(seconds, self._end, self._epoch)

    def _make_room(self) -> int:
        """Rule 4; how many decode then."""
        decodes, prompts = self.decodes, self.prompts
        while decodes.number and prompts.kv_tokens + decodes.number > self._kv_tokens:
            if prompts.running:
                sequence = prompts.running[-1]
                prompts.remove(sequence)
            else:
                sequence = decodes.last()
                decodes.remove(sequence)
                sequence.last_token = self._last_end
            self.preempted += 1
            self.encoding.release(sequence)
            sequence.restart()
            self.waiting.push(sequence, self._sim.now, again=True)
        return decodes.number

    def _end(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        decodes = self.decodes
        now, decoding = self._sim.now, decodes.number
        if decoding:
            gap = now - self._last_end
            self._gap(gap, decoding)
            if decodes.step(gap):
                for sequence in decodes.finished():
                    self._finish(sequence)
        self._last_end = now
        if self._measures:
            self._view.measure(now, decoding, self._rest)
        if self._plain:  # what `_begin` would do, where it does nothing else
            decoding, context = decodes.number, decodes.context
            beside = self.ahead is not None and (self._rest or self.ahead.lane.working)
            if decoding and context + decoding <= self._kv_tokens and not beside:
                seconds = self._step_seconds(decoding, context, 0, 0.0)
                self._llm_seconds += seconds
                self._run(seconds, self._end, epoch)
                return
        elif self.prompts.chunks:
            for sequence in self.prompts.done():
                self._first(sequence, now)
        self._begin()

    def _first(self, sequence: Sequence, now: float) -> None:
        """Its prompt is computed, which makes a token."""
        sequence.made += 1
        if sequence.last_token is None:
            sequence.job.first = now + self._costs.answer_seconds
            if self._spoke is not None:
                self._spoke(sequence.job)
        else:
            gap = now - sequence.last_token
            sequence.largest_gap = max(sequence.largest_gap, gap)
            self._itl.add(gap)
        if sequence.made >= sequence.output_tokens:
            self._finish(sequence)
        else:
            self.decodes.add(sequence)

    def _finish(self, sequence: Sequence) -> None:
        job = sequence.job
        job.largest_gap = sequence.largest_gap
        self._forget(sequence)
        self._jobs[job.request.number] = (job, None)  # until its client has the answer
        self._answer(job)

    def _forget(self, sequence: Sequence) -> None:
        self.encoding.release(sequence)
        if self.ahead is not None:
            self.ahead.release(sequence)

    def _come_back(self, sequences: list[Sequence]) -> None:
        for sequence in reversed(sequences):
            self.waiting.push(sequence, self._sim.now, again=True)
        self._plain = False
        self._wake()
