"""A client of one engine that records the times of its requests."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import ConfigError


@dataclass
class Answer:
    """Times of one request, in seconds of one clock.

    Attributes:
        called: when the client made the request.
        queued: when it entered the waiting queue of the engine core.
        scheduled: when its first step was scheduled.
        steps: for each output, when the engine core had it.
        outputs: for each output, when the client had it.
    """

    called: float
    prompt_tokens: int = 0
    queued: float = 0.0
    scheduled: float = 0.0
    steps: list[float] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)

    @property
    def front_seconds(self) -> float:
        """Return the time that the request spent in the front end, in seconds."""
        return self.queued - self.called

    @property
    def first_step_seconds(self) -> float:
        """Return the time from the request's first step to its first token, in seconds."""
        return self.steps[0] - self.scheduled


class Client:
    """Sends requests to an engine in this process, as a server's front end does."""

    def __init__(self, engine: Any, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        self.config = engine.vllm_config
        self._names = count()

    async def ask(self, prompt: Any, output_tokens: int = 1) -> Answer:
        """Serve one request to its end.

        Raises:
            ConfigError: the engine reports no times of its steps.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=output_tokens, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        answer = Answer(self.clock())
        name = f"calibration-{next(self._names)}"
        async for output in self.engine.generate(prompt, sampling, request_id=name):
            answer.outputs.append(self.clock())
            times = output.metrics
            if times is None:
                raise ConfigError(
                    "the engine records no times of requests: remove 'disable_log_stats' from the engine arguments"
                )
            answer.steps.append(times.last_token_ts)
            answer.queued, answer.scheduled = times.queued_ts, times.scheduled_ts
            answer.prompt_tokens = len(output.prompt_token_ids or ())
        return answer


@contextmanager
def running(arguments: dict[str, Any], clock: Clock) -> Iterator[Client]:
    """Run an engine with these engine arguments for the duration of the block.

    Raises:
        ConfigError: vLLM has no such argument.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        known = AsyncEngineArgs(**arguments)
    except TypeError as error:
        raise ConfigError(f"engine arguments: {error}") from None
    client = Client(AsyncLLM.from_engine_args(known), clock)
    try:
        yield client
    finally:
        client.engine.shutdown()
        # The engine is part of a cycle. Left to the interpreter's exit, its destructor and those of its sockets would
        # run when the modules that they use are gone, and print exceptions.
        del client.engine
        gc.collect()
