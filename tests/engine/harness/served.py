"""Drive an engine as `vllm serve` has it: front end in this process, engine core and worker in others.

Steps depend on timing here, so what is compared are tokens, not decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from tests.engine.harness.inproc import sampling_params
from tests.engine.harness.sources import image_prompt, speech_prompts
from tests.engine.harness.spec import EngineSpec
from tests.engine.harness.workload import Ask, Heard, Scenario, Session, Speech

SECONDS_PER_STEP = 0.004  # spreads arrivals; nothing is asserted about time
PATIENCE_SECONDS = 240


class ServedEngine:
    """`vllm.v1.engine.async_llm.AsyncLLM`, and a client for every request of a scenario."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._runner = asyncio.Runner()
        self._runner.get_loop()
        args = AsyncEngineArgs(
            worker_extension_cls="tests.engine.harness.worker_extension.WorkerExtension",
            enable_log_requests=False,
            **spec.engine_args(),
        )
        self.engine = self._runner.run(_in_loop(lambda: AsyncLLM.from_engine_args(args)))
        runner, *_ = self._ask_workers("classes_of_runner")
        self.facts = {"runner": runner}

    def run(self, scenario: Scenario) -> dict[str, Any]:
        """Returns `{"requests": {id: Heard}, "still_there": ids that front end or worker have not let go}`."""
        heard = self._runner.run(asyncio.wait_for(self._run(scenario), PATIENCE_SECONDS))
        # Workers hear of a finished request with the next step that runs one.
        self._runner.run(self._listen(Ask("last", "x", max_tokens=2), Heard()))
        in_workers = sorted({id_ for ids in self._ask_workers("requests_in_runner") for id_ in ids})
        still_there = [
            *self.engine.output_processor.request_states,
            *(id_ for id_ in in_workers if not id_.startswith("last")),
        ]
        return {"requests": {id_: vars(answer) for id_, answer in heard.items()}, "still_there": still_there}

    async def _run(self, scenario: Scenario) -> dict[str, Heard]:
        heard = {request.id: Heard() for request in scenario.requests}
        async with asyncio.TaskGroup() as clients:
            for request in sorted(scenario.requests, key=lambda request: request.at_step):
                clients.create_task(self._client(request, heard[request.id]))
        return heard

    async def _client(self, request: Ask | Session | Speech, answer: Heard) -> None:
        await asyncio.sleep(request.at_step * SECONDS_PER_STEP)
        await self._listen(request, answer)

    async def _listen(self, request: Ask | Session | Speech, answer: Heard) -> None:
        answered = asyncio.Condition()
        if isinstance(request, Ask):
            prompt: Any = image_prompt(request.prompt, request.images)
            params = sampling_params(request.max_tokens, request.seed)
        else:
            prompt = self._talk(request, answer, answered)
            params = sampling_params(request.tokens_per_chunk, stops=request.stops)
        leaving = request.abort_after
        stream = self.engine.generate(prompt, params, request.id)
        if leaving == 0:
            stream = await self._leave_at_once(stream, request.id)
        async for output in stream:
            async with answered:
                answer.extend(output.outputs[0])
                answered.notify_all()
            if leaving is not None and len(answer.tokens) >= leaving:
                await self.engine.abort(request.id)
                leaving = None
            if answer.finish_reason == "error":  # in 0.30 the stream of a session does not end with it
                break
        if request.abort_after is not None:
            answer.cut(request.abort_after)

    async def _leave_at_once(self, stream: Any, id_: str) -> Any:
        first = asyncio.ensure_future(anext(stream))
        while not self.engine.output_processor.external_req_ids.get(id_) and not first.done():
            await asyncio.sleep(0)
        await self.engine.abort(id_)
        await asyncio.wait([first])
        return stream

    async def _talk(
        self, session: Session | Speech, answer: Heard, answered: asyncio.Condition
    ) -> AsyncGenerator[Any, None]:
        from vllm.engine.protocol import StreamingInput

        if isinstance(session, Speech):
            answers: asyncio.Queue[list[int]] = asyncio.Queue()
            prompts = speech_prompts(session, answers, self.engine.model_config)
            sent = 0
            async for prompt in prompts:
                yield StreamingInput(prompt=prompt)
                sent += 1
                await _until(answered, answer, sent)
                answers.put_nowait(answer.tokens[-1:])
            return
        for index, chunk in enumerate(session.chunks, start=1):
            yield StreamingInput(prompt=image_prompt(chunk.prompt, chunk.images))
            if not session.backlog:
                await _until(answered, answer, index)
                await asyncio.sleep(session.gap_steps * SECONDS_PER_STEP)

    def _ask_workers(self, method: str) -> Any:
        return self._runner.run(self.engine.collective_rpc(method))

    def close(self) -> None:
        self.engine.shutdown()
        self._runner.close()


async def _until(answered: asyncio.Condition, answer: Heard, num_answers: int) -> None:
    async with answered:
        await answered.wait_for(lambda: len(answer.ends) >= num_answers)


async def _in_loop(make: Any) -> Any:
    return make()
