"""Simulate engines of which some compute prompts and others decode, with the KV cache sent from one to the other."""

from collections.abc import Callable
from dataclasses import replace

from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.costs.hardware import Link
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.engine.server import EngineServer
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.server import Done, Job

Fetch = Callable[[Job, int], None]
"""Function that begins to send so many tokens of a job's KV cache to the engine that calls it."""


class PrefillEngine(EngineServer):
    """Models an engine that computes prompts for others.

    1. Its requests have one token, with which their prompt is computed. They leave with it.
    2. Their KV cache stays until `let_go`: vLLM's connectors free blocks when the other engine has read them.

    ``held``: sequences by rule 2, by the number of their request.
    """

    __slots__ = ("held",)

    def __init__(
        self,
        sim: Simulator,
        costs: EngineCosts,
        limits: EngineLimits,
        core: EngineCore,
        done: Done,
    ) -> None:
        super().__init__(sim, costs, limits, core, done, Histogram())
        self.held: dict[int, Sequence] = {}

    def let_go(self, number: int) -> None:
        """Free the KV cache of a request, if it is still here."""
        sequence = self.held.pop(number, None)
        if sequence is None:
            return
        self.prompts.pinned -= sequence.prompt
        self.prompts.release(sequence)
        self._kv_tokens = self.prompts.kv_room
        self._plain = False
        self._wake()

    def kill(self) -> list[Job]:
        """Kill the engine and return its jobs; what it held is lost, too."""
        self.held.clear()
        return super().kill()

    def _forget(self, sequence: Sequence, *, counts: bool = True) -> None:
        if not counts:
            super()._forget(sequence, counts=False)
            return
        self.encoding.release(sequence)
        self.held[sequence.job.request.number] = sequence
        self.prompts.pinned += sequence.prompt
        self._kv_tokens = self.prompts.kv_room
        if self._measures:
            self.core.leave(sequence.request_id, sequence.made, self._sim.now)


class DecodeEngine(EngineServer):
    """Models an engine that decodes requests whose prompts others have computed.

    1. A request that is next in the queue reserves room for its prompt. Then its KV cache is fetched, but for what the
       prefix cache has of it. It runs when all is there (`came`), and has no token before.
    2. A request that was preempted is computed here.
    3. If a client gives up while its KV cache is fetched, the room is free at the end of the transfer.

    Args:
        fetch: begins a transfer.
    """

    __slots__ = ("_coming", "_fetch")

    def __init__(
        self,
        sim: Simulator,
        costs: EngineCosts,
        limits: EngineLimits,
        core: EngineCore,
        done: Done,
        itl: Histogram,
        fetch: Fetch,
    ) -> None:
        super().__init__(sim, costs, limits, core, done, itl)
        self._fetch = fetch
        self._coming: dict[int, Sequence] = {}
        self.prompts.fetch = self._begin_fetch

    def _new_sequence(self, job: Job) -> Sequence:
        sequence = super()._new_sequence(job)
        sequence.remote = True
        return sequence

    def _begin_fetch(self, sequence: Sequence, tokens: int) -> None:
        job = sequence.job
        self._coming[job.request.number] = sequence
        self._fetch(job, tokens)

    def fetches(self, number: int) -> bool:
        """Return whether the KV cache of a request is on its way."""
        return number in self._coming

    def came(self, job: Job) -> None:
        """End the transfer of a job's KV cache."""
        sequence = self._coming.pop(job.request.number, None)
        if sequence is None or sequence.job is not job:
            return  # the engine died meanwhile
        self._stop_leap()
        if self._is_here(self._epoch, job):
            self.prompts.arrive(sequence)
        else:
            self._unpin(sequence)
        self._plain = False
        self._wake()

    def kill(self) -> list[Job]:
        """Kill the engine and return its jobs."""
        self._coming.clear()
        return super().kill()

    def _unpin(self, sequence: Sequence) -> None:
        self.prompts.pinned -= sequence.prompt
        self.prompts.release(sequence)
        self._kv_tokens = self.prompts.kv_room

    def _withdraw(self, sequence: Sequence) -> None:
        if sequence in self.prompts.arrived:
            self.prompts.arrived.remove(sequence)
            self._unpin(sequence)
        else:
            super()._withdraw(sequence)

    def _forget(self, sequence: Sequence, *, counts: bool = True) -> None:
        if not self.fetches(sequence.job.request.number):
            super()._forget(sequence, counts=counts)
        elif self._measures:  # its blocks are free at the end of the transfer
            self.core.leave(sequence.request_id, 0, self._sim.now)


class PrefillDecode:
    """Models prefill engines and decode engines behind a proxy, with vLLM's connectors NIXL or Mooncake.

    1. The proxy gives requests to prefill engines in turn, for one token, which the client does not get. When it has
       that, it gives the request to a decode engine; these get them in turn, too, by their order of arrival.
    2. The decode engine fetches the KV cache (`DecodeEngine`). Until it has it the prefill engine holds it
       (`PrefillEngine`). All tokens of an answer come from the decode engine.
    3. A transfer takes the link of both engines; transfers of an engine follow each other. A replica has as many links
       as devices. A key-value head that several devices hold is sent to each.
    4. A request that is too long for either is refused, like one for an engine.

    Args:
        prefill: costs and limits of a prefill engine, and their number; ``decode``: the same.
        core: returns a core for an engine with such limits; with True for a decode engine.
        token_bytes: of the KV cache of a token, on all devices of a decode engine.
        links: that a transfer has.
        done: called with each job when its client has its last token.
    """

    def __init__(
        self,
        sim: Simulator,
        prefill: tuple[EngineCosts, EngineLimits, int],
        decode: tuple[EngineCosts, EngineLimits, int],
        core: Callable[[EngineLimits, bool], EngineCore],
        token_bytes: float,
        link: Link,
        links: int,
        done: Done,
        itl: Histogram,
    ) -> None:
        self._sim, self._done = sim, done
        self._token_seconds, self._latency = token_bytes / (link.bytes_per_second * links), link.latency_seconds
        costs, limits, number = prefill
        self.prefills = [PrefillEngine(sim, costs, limits, core(limits, False), self._computed) for _ in range(number)]
        costs, limits, number = decode
        self.decodes = [
            DecodeEngine(sim, costs, limits, core(limits, True), self._answered, itl, self._fetch)
            for _ in range(number)
        ]
        self._sending, self._receiving = [0.0] * len(self.prefills), [0.0] * len(self.decodes)
        self._jobs: dict[int, Job] = {}  # that no decode engine has yet
        self._prefilling: dict[int, Job] = {}
        self._came = 0
        self._place: dict[int, int] = {}
        self.sent_bytes = 0.0
        self._token_bytes = token_bytes

    def submit(self, job: Job) -> None:
        """Give a job to the next prefill engine.

        Raises:
            ConfigError: it never fits.
        """
        number, request = job.request.number, job.request
        place, self._came = self._came, self._came + 1
        self._place[number] = place
        self.decodes[place % len(self.decodes)].check(request)
        first = Job(replace(request, output_tokens=1), job.stage)
        self._jobs[number], self._prefilling[number] = job, first
        self.prefills[place % len(self.prefills)].submit(first)

    def _computed(self, first: Job) -> None:
        number = first.request.number
        job = self._jobs.pop(number)
        del self._prefilling[number]
        self._decode_of(number).submit(job)

    def _fetch(self, job: Job, tokens: int) -> None:
        number = job.request.number
        place = self._place[number]
        sender, receiver = place % len(self.prefills), place % len(self.decodes)
        begin = max(self._sim.now, self._sending[sender], self._receiving[receiver])
        end = begin + tokens * self._token_seconds
        self._sending[sender] = self._receiving[receiver] = end
        self.sent_bytes += tokens * self._token_bytes
        self._sim.at(end + self._latency, self._fetched, job)

    def _fetched(self, job: Job) -> None:
        number = job.request.number
        self._prefill_of(number).let_go(number)
        self._decode_of(number).came(job)

    def _answered(self, job: Job) -> None:
        self._place.pop(job.request.number)
        self._done(job)

    def abort(self, job: Job) -> None:
        """Forget a job whose client has given up."""
        number = job.request.number
        if number in self._jobs:
            del self._jobs[number]
            self._prefill_of(number).abort(self._prefilling.pop(number))
            self._prefill_of(number).let_go(number)  # it may have its token, but not the proxy
        elif number in self._place:
            self._decode_of(number).abort(job)
            if not self._decode_of(number).fetches(number):
                self._prefill_of(number).let_go(number)

    def catch_up(self) -> None:
        """Compute the steps that have ended before now."""
        for engine in (*self.prefills, *self.decodes):
            engine.catch_up()

    def _prefill_of(self, number: int) -> PrefillEngine:
        return self.prefills[self._place[number] % len(self.prefills)]

    def _decode_of(self, number: int) -> DecodeEngine:
        return self.decodes[self._place[number] % len(self.decodes)]
