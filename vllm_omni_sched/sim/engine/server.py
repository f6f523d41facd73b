"""Simulate one engine: its front end, and its steps one after another."""

from typing import Protocol

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.engine.lane import Ahead
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.prompts import Encoding, Prompts
from vllm_omni_sched.sim.engine.requests import DecodingSequences, Sequence, make_queue
from vllm_omni_sched.sim.engine.view import StepView
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.work import Done, Job, Request

# of a processor of the LLM, for the lane: a process of niceness 10 has a tenth beside one of 0,
# and for about a fifth of a step the LLM waits for its host
_BESIDE_STEPS = 0.3


class Watcher(Protocol):
    """Function that is called with each step, for a trace."""

    def __call__(self, name: str, start: float, seconds: float, **facts: float) -> None: ...


class EngineServer:
    """Models a vLLM engine on its devices.

    1. A request first passes the front end, which serves one at a time, then it waits. It stays until its client has
       the answer, ``answer_seconds`` after its last token.
    2. A step: decoding requests make a token each, prompts are computed (`Prompts`), items are encoded before
       that (`Encoding`). The next one begins when it ends.
    3. With ``encode_ahead`` items are encoded in a lane meanwhile (`Ahead`); then the LLM has what the lane leaves.
       If the lane has its own processors and a place on the LLM's, that place has what steps leave it.
    4. If decoding requests run out of KV memory, the one admitted last frees all its blocks and
       waits again; its tokens are computed again.

    Not modelled: the gain of async scheduling, which the costs of a step include.

    Args:
        done: called with each job when its client has its last token.
        itl: histogram of the times between tokens of every request.
        on_first_output: called with each job when it has its first token.

    ``steps``: steps that began. ``preempted``: number of preemptions by rule 4.
    """

    def __init__(
        self,
        sim: Simulator,
        costs: EngineCosts,
        limits: EngineLimits,
        core: EngineCore,
        done: Done,
        itl: Histogram,
        watcher: Watcher | None = None,
        on_first_output: Done | None = None,
    ) -> None:
        self._sim, self._costs, self._done, self._on_first_output = sim, costs, done, on_first_output
        self._kv_tokens, self._item_embeds = limits.kv_tokens, limits.item_embeds
        self._request_tokens = limits.kv_tokens  # of one request
        self._jobs: dict[int, tuple[Job, Sequence | None]] = {}  # with its sequence, while it is in the engine
        self._front_until = 0.0
        self._epoch = 0  # of its life: what belongs to one before never happens
        self.in_flight = 0
        self.core = core
        self._itl, self._watcher = itl, watcher
        self.waiting = make_queue(core)
        self.decodes = DecodingSequences()
        self.encoding = Encoding(limits, core)
        self.prompts = Prompts(limits, core, self.waiting, self.decodes, self.encoding)
        self._view = StepView(sim, costs, core, self.waiting, self.decodes, self.prompts, self.encoding)
        self.ahead: Ahead | None = None
        if core.ahead is not None:
            self.ahead = Ahead(sim, costs, limits, core, self._come_back)
            self.prompts.ahead = self._view.ahead = self.ahead
            self.ahead.view = self._view
        # a lane with processors of its own, and a place on the LLM's
        self._lane_shares = self.ahead is not None and limits.paced and limits.lane_beside and limits.lane_items > 1
        self.preempted = 0
        self._stepping = False
        self._last_end = 0.0
        self._rest = 0.0
        self._llm_seconds = self._encode_seconds = self._lane_seconds = 0.0
        self._lane_before = 0.0  # what the lane had worked when the engine became idle
        # of the running step: its end, and its seconds of each kind of work, which come last in it
        self._step_ends = self._step_llm = self._step_encode = 0.0
        self._step_owed = 0.0  # of its seconds, those that make up for earlier steps
        # of all steps that began: decoded tokens, KV entries that they read, and computed prompt tokens and pairs
        self._made = self._read = self._prompt_tokens = 0
        self._prompt_pairs = 0.0
        self._measures = core.decides
        self._may_be_plain = watcher is None and not self._lane_shares
        if core.lending is not None and self.ahead is not None:  # the end of an encode may lend what steps count on
            self._may_be_plain = False
        self._lending = core.lending
        if core.lending is not None:
            self._request_tokens -= core.lending.most_blocks
        self._plain = False  # no request can enter, and no prompt is computed: the next step is like this one
        # cached, since each step uses them
        self._step_seconds, self._gap = costs.step_seconds, itl.add
        self._run = sim.soon  # schedules the end of a step

    # -- the front end

    def submit(self, job: Job) -> None:
        """Submit a job to the front end.

        Raises:
            ConfigError: as for `check`.
        """
        request = job.request
        self.check(request)
        self.in_flight += 1
        self._jobs[request.number] = (job, None)
        job.submitted = self._sim.now
        self._to_front(self._costs.frontend_seconds(request), (self._epoch, job))

    def check(self, request: Request) -> None:
        """Check that the engine can serve a request.

        Raises:
            ConfigError: it never fits into the KV cache, or one of its items never into the encoder cache.
        """
        largest = max((item.embeds for item in request.items), default=0)
        if largest > self._item_embeds:
            raise ConfigError(
                f"request {request.number} has an item of {largest} embeddings, but the engine accepts at most "
                f"{self._item_embeds}, and vLLM would refuse it: set 'largest_item_embeds' to what the model's "
                "processor can make, or send smaller items"
            )
        needs = request.prompt_tokens + request.output_tokens
        if needs > self._request_tokens:
            never = (
                "" if self._request_tokens == self._kv_tokens else f" of which {self._request_tokens} are never lent"
            )
            raise ConfigError(
                f"request {request.number} needs {needs} tokens of KV cache, but a replica has {self._kv_tokens}"
                f"{never}; give it more devices, more of their memory, or shorter requests"
            )

    def _to_front(self, seconds: float, came: tuple[int, Job]) -> None:
        if seconds:
            self._front_until = max(self._front_until, self._sim.now) + seconds
            self._sim.at(self._front_until, self._enter, came)
        else:
            self._enter(came)

    def _is_here(self, epoch: int, job: Job) -> bool:
        return epoch == self._epoch and self._jobs.get(job.request.number, (None,))[0] is job

    def _say(self, job: Job, at: float) -> None:
        """Pass on the first token of a job."""
        job.first = at + self._costs.answer_seconds
        if self._on_first_output is not None:
            self._on_first_output(job)

    def _answer(self, job: Job) -> None:
        """Answer a job that has made its last token."""
        answer = self._costs.answer_seconds
        if answer:
            self._sim.after(answer, self._answered, (self._epoch, job))
        else:
            self._answered((self._epoch, job))

    def _answered(self, ended: tuple[int, Job]) -> None:
        epoch, job = ended
        if self._is_here(epoch, job):
            self._leave(job)
            self._done(job)

    def _leave(self, job: Job) -> Sequence | None:
        """Remove a job; return its sequence if it is in the engine."""
        self.in_flight -= 1
        return self._jobs.pop(job.request.number)[1]

    def _die(self) -> list[Job]:
        """Remove and return all jobs."""
        lost = [job for job, _ in self._jobs.values()]
        self._epoch += 1
        self._jobs.clear()
        self.in_flight = 0
        self._front_until = 0.0
        return lost

    def _enter(self, came: tuple[int, Job]) -> None:
        epoch, job = came
        if not self._is_here(epoch, job):
            return
        request = job.request
        sequence = self._new_sequence(job)
        if self._measures:
            self.core.enter(sequence.request_id, sequence.sla, self._sim.now, request.arrival)
        self._jobs[request.number] = (job, sequence)
        self.waiting.push(sequence, self._sim.now)
        self._plain = False
        self._wake()

    def _new_sequence(self, job: Job) -> Sequence:
        return Sequence(job, self.core.classes[job.request.sla], self._sim.now)

    def abort(self, job: Job) -> None:
        """Forget a job; unknown ones are ignored."""
        sequence = self._leave(job) if self._is_here(self._epoch, job) else None
        if sequence is None:
            return
        self._withdraw(sequence)
        self._forget(sequence, counts=False)
        if self.waiting.sequences:  # there may be room for them now
            self._plain = False
            self._wake()

    def _withdraw(self, sequence: Sequence) -> None:
        """Remove a sequence from wherever it is."""
        if sequence.request_id in self.decodes.sequences:
            self.decodes.remove(sequence)
        elif sequence in self.prompts.running:
            self.prompts.remove(sequence)
        elif not self.waiting.remove(sequence) and self.ahead is not None:
            self.ahead.held.pop(sequence.request_id, None)

    def kill(self) -> list[Job]:
        """Kill the engine and return its jobs."""
        llm, encode = self._to_come()
        self._llm_seconds -= llm
        self._encode_seconds -= encode
        self._step_ends = self._sim.now
        lost = self._die()
        self.core.reset(self._sim.now)
        if self.ahead is not None:
            self.ahead.kill()
        for sequence in self.waiting.first(len(self.waiting.sequences), self._sim.now):
            self.waiting.remove(sequence)
        for sequence in list(self.decodes.sequences.values()):
            self.decodes.remove(sequence)
        self.prompts.forget()
        self.encoding.clear()
        if self.ahead is not None and not self._stepping:
            self._lane_seconds += self.ahead.lane.worked_seconds() - self._lane_before
        if self.ahead is not None:
            self._lane_before = self.ahead.lane.worked_seconds()
        self._stepping = self._plain = False
        return lost

    def _first(self, sequence: Sequence, now: float) -> None:
        sequence.made += 1
        if sequence.last_token is None:
            self._say(sequence.job, now)
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

    def _forget(self, sequence: Sequence, *, counts: bool = True) -> None:
        self.encoding.release(sequence)
        if self._measures:
            self.core.leave(sequence.request_id, sequence.made if counts else 0, self._sim.now)

    def _come_back(self, sequences: list[Sequence]) -> None:
        for sequence in reversed(sequences):
            self.waiting.push(sequence, self._sim.now, again=True)
        self._plain = False
        self._wake()

    # -- steps

    def busy_seconds(self) -> dict[str, float]:
        """Return the seconds of steps by kind of work, up to now, and those of the lane.

        ``lane_alone`` are those in which the lane encoded while no step ran,
        ``lane`` those in which it encoded at all, which overlap with steps.
        """
        llm, encode = self._to_come()
        if self.ahead is None:
            return {"llm": self._llm_seconds - llm, "encode": self._encode_seconds - encode}
        worked = self.ahead.lane.worked_seconds()
        alone = 0.0 if self._stepping else worked - self._lane_before
        return {
            "llm": self._llm_seconds - llm,
            "encode": self._encode_seconds - encode,
            "lane_alone": self._lane_seconds + alone,
            "lane": worked,
        }

    def operations_seconds(self) -> float | None:
        """Return the seconds that all operations so far would take with nothing to wait for.

        They include steps, their encodes and those of the lane up to now. None if the costs do not know it.
        """
        encode = self.busy_seconds()["encode"]
        of = self._costs.operations_seconds
        llm = of(self._made, self._read, self._prompt_tokens, self._prompt_pairs)
        if llm is None:
            return None
        if left := self._to_come()[0]:
            decodes, prompts = self.decodes, self.prompts
            step = of(decodes.number, decodes.context, prompts.tokens, prompts.pairs)
            llm -= ((step or 0.0) + self._step_owed) * left / self._step_llm
        lane = self.ahead.operations_seconds() if self.ahead is not None else 0.0
        return llm + encode + lane - self._view.unpaid_seconds()  # work whose time is still to be spent

    def _to_come(self) -> tuple[float, float]:
        """Return the seconds of the running step that have not passed, of the LLM and of encoding."""
        left = self._step_ends - self._sim.now
        if left <= 0.0 or not self._step_llm:
            return 0.0, 0.0
        llm, encode = self._step_llm, self._step_encode
        whole = llm + encode
        part = left / whole if left < whole else 1.0  # before them it may pause
        return part * llm, part * encode

    def _wake(self) -> None:
        """Begin a step after all other events of this time."""
        if not self._stepping:
            self._stepping = True
            if self.ahead is not None:
                self._lane_seconds += self.ahead.lane.worked_seconds() - self._lane_before
            self._sim.soon(0.0, self._woken, self._epoch)

    def _woken(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._begin()

    def _begin(self) -> None:
        decodes, prompts, sim = self.decodes, self.prompts, self._sim
        decoding = decodes.number
        lending = self._lending
        if lending is not None:
            if self.ahead is not None:
                self.ahead.send()  # also where no prompt is planned: a loan may let an encode begin
            else:
                lending.plan(self._view, sim.now)
            self._kv_tokens = prompts.kv_room
        if decodes.context + prompts.computed + decoding > self._kv_tokens:
            decoding = self._make_room()
        encode = 0.0
        if prompts.running or (self.waiting.sequences and prompts.room()):
            prompts.plan(self._view, sim.now)
            for modality, (items, embeds) in self.encoding.step.items():
                encode += self._costs.encode_seconds(modality, embeds, items)
            if self.ahead is not None:
                self.ahead.send()
            if lending is not None and self.encoding.step:
                lending.step_began(sum([embeds for _, embeds in self.encoding.step.values()]))
        elif prompts.chunks:
            prompts.clear()
            self.encoding.begin()
        tokens = prompts.tokens
        self._plain = self._may_be_plain and not (prompts.running or prompts.chunks or self._may_enter())
        if lending is not None and lending.lent_blocks:  # it is taken back between steps
            self._plain = False
        self._rest = self._step_owed = 0.0
        if self._plain and self._plain_step():
            return
        if not decoding and not tokens:
            self._stepping = False
            if self.ahead is not None:
                self._lane_before = self.ahead.lane.worked_seconds()
            if self._lane_shares:
                self.ahead.lane.slow_last(1.0)  # type: ignore[union-attr]
            return
        seconds = self._step_seconds(decoding, decodes.context, tokens, prompts.pairs)
        if self.ahead is not None:
            self._step_owed = self._view.owed_seconds()
            if self.ahead.lane.working:
                seconds, self._rest = self._view.beside_lane(self.ahead, seconds, sim.now)
            seconds += self._step_owed
        self._llm_seconds += seconds
        self._made += decoding
        self._read += decodes.context
        self._prompt_tokens += tokens
        self._prompt_pairs += prompts.pairs
        self._step_llm, self._step_encode = seconds, encode
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
        self._step_ends = sim.now + seconds
        self._run(seconds, self._end, self._epoch)

    def _may_enter(self) -> bool:
        """Return whether a request waits that the next step might admit, as far as is known before planning."""
        return bool(self.waiting.sequences) and (self.core.limits.batch is not None or self.prompts.room())

    def _make_room(self) -> int:
        """Preempt requests by rule 4, and return how many decode then."""
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
                self._plain = self._plain and not self._may_enter()
        self._last_end = now
        if self._plain:  # what `_begin` would do if nothing else happens
            if self._measures:
                self._view.measure_decodes(now, decoding, self._rest)
            if self._plain_step():
                return
            self._begin()
            return
        if self._measures:
            self._view.measure(now, decoding, self._rest)
        if self.prompts.chunks:
            for sequence in self.prompts.done():
                self._first(sequence, now)
        self._begin()

    def _plain_step(self) -> bool:
        """Begin the next step if it only decodes and the lane does not hold it back; return whether it does."""
        decodes, context = self.decodes, self.decodes.context
        decoding = decodes.number
        if not decoding or context + decoding > self._kv_tokens:
            return False
        ahead = self.ahead
        if ahead is not None and (ahead.lane.working or self._rest):
            if ahead.paced:
                return False
            self._step_owed = self._view.owed_seconds()
            seconds = self._step_seconds(decoding, context, 0, 0.0)
            seconds = self._view.beside_lane(ahead, seconds, self._sim.now)[0] + self._step_owed
            self._run(seconds, self._end, self._epoch)
        else:
            seconds = self._step_seconds(decoding, context, 0, 0.0)
            self._run(seconds, self._end, self._epoch)
            self._step_owed = 0.0
        self._llm_seconds += seconds
        self._made += decoding
        self._read += context
        self._step_ends, self._step_llm, self._step_encode = self._sim.now + seconds, seconds, 0.0
        return True
