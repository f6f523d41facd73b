"""Simulate the engine: arrivals and ends of requests."""

from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.engine.steps import Steps
from vllm_omni_sched.sim.server import Job


class EngineServer(Steps):
    """Models a vLLM engine on its devices.

    1. A request first passes the front end, which serves one at a time, then it waits.
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

    __slots__ = ()

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
