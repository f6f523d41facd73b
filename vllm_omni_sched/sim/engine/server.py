"""The engine: who comes, and who goes."""

from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.engine.steps import Steps
from vllm_omni_sched.sim.server import Job


class EngineServer(Steps):
    """A vLLM engine on its device or devices.

    1. A request first goes through the front end, which serves one at a time, then it waits.
    2. A step: those who decode make a token each, prompts are computed (`Prompts`), items are encoded in front of
       that (`Encoding`). The next one begins when it ends.
    3. With ``encode_ahead`` items are encoded in a lane meanwhile (`Ahead`); then the LLM has what the lane leaves.
       Where the lane has processors of its own and a place on the LLM's, that place has what steps leave it.
    4. Where those who decode have no KV memory left, the one that was let in last gives back all that it has and
       waits again; what it had is computed anew.

    What is left out: prefix caching, speculative decoding, and what scheduling ahead (async scheduling) saves, which
    the costs of a step contain.

    Args:
        done: called with each job when its client has its last token.
        itl: takes the time between tokens of every request.
        spoke: called with each job when it has its first token.

    ``steps``: that began. ``preempted``: how often rule 4 was needed.
    """

    __slots__ = ()

    def _enter(self, came: tuple[int, Job]) -> None:
        epoch, job = came
        if not self._is_here(epoch, job):
            return
        self._stop_leap()
        sequence = Sequence(job, self._policies.sla(job.request.sla), self._sim.now)
        self._jobs[job.request.number] = (job, sequence)
        self.waiting.push(sequence, self._sim.now)
        self._plain = False
        self._wake()

    def abort(self, job: Job) -> None:
        """Forget a job; nothing if it is not here."""
        self._stop_leap()
        sequence = self._leave(job) if self._is_here(self._epoch, job) else None
        if sequence is None:
            return
        if sequence.name in self.decodes.sequences:
            self.decodes.remove(sequence)
        elif sequence in self.prompts.running:
            self.prompts.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._forget(sequence, counts=False)

    def kill(self) -> list[Job]:
        """Die."""
        self.catch_up()
        self._leap = None
        llm, encode = self._to_come()
        self._llm_seconds -= llm
        self._encode_seconds -= encode
        self._step_ends = self._sim.now
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
        if self.prompts.rounds is not None:
            self.prompts.rounds.ended(sequence, counts=counts)
        if self.ahead is not None:
            self.ahead.release(sequence)

    def _come_back(self, sequences: list[Sequence]) -> None:
        self._stop_leap()
        for sequence in reversed(sequences):
            self.waiting.push(sequence, self._sim.now, again=True)
        self._plain = False
        self._wake()
