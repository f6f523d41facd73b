"""Model the front end of an engine: its requests and answers."""

from abc import ABC, abstractmethod

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.server import Done, Job
from vllm_omni_sched.sim.work import Request


class FrontEnd(ABC):
    """Front end of an engine.

    1. A job passes the front end, which serves one at a time, and then enters the engine (`_enter`).
    2. It stays until its client has the answer, ``answer_seconds`` after its last token.
    3. Jobs of an engine that died never answer: each life has a number, which all pending events carry.
    """

    __slots__ = (
        "_costs",
        "_done",
        "_epoch",
        "_front_until",
        "_item_embeds",
        "_jobs",
        "_kv_tokens",
        "_on_first_output",
        "_request_tokens",
        "_sim",
        "in_flight",
    )

    def __init__(
        self, sim: Simulator, costs: EngineCosts, limits: EngineLimits, done: Done, on_first_output: Done | None = None
    ) -> None:
        self._sim, self._costs, self._done, self._on_first_output = sim, costs, done, on_first_output
        self._kv_tokens, self._item_embeds = limits.kv_tokens, limits.item_embeds
        self._request_tokens = limits.kv_tokens  # of one request
        self._jobs: dict[int, tuple[Job, Sequence | None]] = {}  # with its sequence, while it is in the engine
        self._front_until = 0.0
        self._epoch = 0
        self.in_flight = 0

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

    @abstractmethod
    def _enter(self, came: tuple[int, Job]) -> None:
        """Enter the engine, if the job is still here (`_is_here`)."""

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
