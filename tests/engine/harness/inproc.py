"""An engine whose core, scheduler and worker are objects of this process: every run takes the same steps."""

from __future__ import annotations

from typing import Any

from tests.engine.harness.observer import Observer
from tests.engine.harness.sources import ChunkSource, chunk_source, image_prompt
from tests.engine.harness.spec import EngineSpec
from tests.engine.harness.workload import Ask, Heard, Request, Scenario, Session, Speech, Straggler

VOCABULARY = 512


class InProcessEngine:
    """`vllm.v1.engine.llm_engine.LLMEngine` with a script to follow, one step at a time."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        config = EngineArgs(**spec.engine_args()).create_engine_config()
        self.engine = LLMEngine.from_vllm_config(config)
        self.core = self.engine.engine_core.engine_core
        self.model_config = config.model_config
        worker = getattr(self.core.model_executor, "driver_worker", None)  # None: several, in processes of their own
        runner_classes = () if worker is None else type(worker.worker.model_runner).__mro__[:-1]
        self.facts = {
            "scheduler": _path(self.core.scheduler),
            "encoder_cache_manager": _path(self.core.scheduler.encoder_cache_manager),
            "runner": [_path_of(cls) for cls in runner_classes],
            "batch_queue": self.core.batch_queue is not None,
        }
        self.observer = Observer(self.core.scheduler)

    def run(self, scenario: Scenario) -> dict[str, Any]:
        """Returns `{"requests": {id: Heard}, **Observer.report()}`; raises what the engine raises."""
        self.observer.reset()
        self.engine.reset_prefix_cache()
        self.engine.reset_encoder_cache()  # what a scenario finds does not depend on those before it
        heard = {request.id: Heard() for request in scenario.requests}
        arrivals = sorted(scenario.requests, key=lambda request: request.at_step)
        here: dict[str, Request] = {}  # by the id that the engine knows
        talks: list[_Talk] = []
        for step in range(scenario.max_steps):
            while arrivals and arrivals[0].at_step <= step:
                request = arrivals.pop(0)
                here[request.session if isinstance(request, Straggler) else request.id] = request
                if isinstance(request, Session | Speech):
                    talks.append(_Talk(request, chunk_source(request, self.model_config)))
                else:
                    self._arrive(request)
            for talk in talks:
                if here.get(talk.session.id) is talk.session and not self._talk(talk, heard[talk.session.id], step):
                    del here[talk.session.id]
            if not here and not arrivals:
                break
            for output in self.engine.step():
                if request := here.get(output.request_id):
                    self._hear(output, request, heard[request.id], here)
            for request in [request for request in here.values() if request.abort_after == 0]:
                self._leave(request, heard[request.id], here)
        else:
            raise TimeoutError(f"{scenario.name}: not done after {step} steps, still waiting for {sorted(here)}")
        for talk in talks:
            talk.source.close()
        for _ in range(4):  # what was in flight when the last request left
            self.engine.step()
        return {"requests": {id_: vars(answer) for id_, answer in heard.items()}, **self.observer.report()}

    def _hear(self, output: Any, request: Request, answer: Heard, here: dict[str, Request]) -> None:
        answer.extend(output.outputs[0])
        if request.abort_after is not None and len(answer.tokens) >= request.abort_after:
            self._leave(request, answer, here)
        elif output.finished or answer.finish_reason == "error":  # to the front end a session that fails goes on
            del here[output.request_id]

    def _leave(self, request: Request, answer: Heard, here: dict[str, Request]) -> None:
        self.engine.abort_request([request.id])
        answer.cut(request.abort_after)
        del here[request.id]

    def _arrive(self, request: Ask | Straggler) -> None:
        if isinstance(request, Straggler):
            self._add(request.session, image_prompt(request.chunk.prompt, request.chunk.images), 1, resumable=True)
        else:
            prompt = image_prompt(request.prompt, request.images)
            self._add(request.id, prompt, request.max_tokens, seed=request.seed, items_reversed=request.items_reversed)

    def _talk(self, talk: _Talk, answer: Heard, step: int) -> bool:
        """Send the session's next chunk if it is time. False: it has sent the end of its input and all was answered."""
        session = talk.session
        while session.backlog or len(answer.ends) == talk.chunks_sent:
            if not session.backlog and talk.chunks_sent and step < talk.answered_at(step) + session.gap_steps:
                return True
            talk.answered = None
            prompt = talk.source.next(answer.tokens[-session.tokens_per_chunk :])
            if prompt is None:
                if talk.ended:
                    return True
                talk.ended = True
                self._add(session.id, {"prompt_token_ids": [0]}, session.tokens_per_chunk, end_of_session=True)
                return session.backlog
            self._add(session.id, prompt, session.tokens_per_chunk, stops=session.stops, resumable=True)
            talk.chunks_sent += 1
        return True

    def _add(
        self,
        id_: str,
        prompt: Any,
        max_tokens: int,
        *,
        seed: int | None = None,
        stops: bool = False,
        resumable: bool = False,
        end_of_session: bool = False,
        items_reversed: bool = False,
    ) -> None:
        request = self.engine.input_processor.process_inputs(
            id_,
            prompt,
            sampling_params(max_tokens, seed, stops=stops),
            self.engine.get_supported_tasks(),
            resumable=resumable,
        )
        request.external_req_id = id_  # as AsyncLLM does for sessions; without a random suffix, so that runs compare
        self.engine.output_processor.add_request(request, None if end_of_session else prompt.get("prompt"))
        sent = self._as_sent(request)
        if items_reversed and sent.mm_features:
            sent.mm_features.reverse()
        self.engine.engine_core.add_request(sent)

    def _as_sent(self, request: Any) -> Any:
        """Return the request as another process would get it: front end and core both extend a session's token list."""
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        return MsgpackDecoder(type(request)).decode(MsgpackEncoder().encode(request))

    def close(self) -> None:
        """Shut the engine down, which collects garbage itself; another round over all of torch takes half a second."""
        self.engine.engine_core.shutdown()
        del self.engine, self.core, self.observer


class _Talk:
    """Records how far a session has come."""

    def __init__(self, session: Session | Speech, source: ChunkSource) -> None:
        self.session = session
        self.source = source
        self.chunks_sent = 0
        self.ended = False
        self.answered: int | None = None

    def answered_at(self, step: int) -> int:
        if self.answered is None:
            self.answered = step
        return self.answered


def sampling_params(max_tokens: int, seed: int | None = None, *, stops: bool = False) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0 if seed is None else 1,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=list(range(0, VOCABULARY, 3)) if stops else None,
        ignore_eos=True,
        logprobs=0,
        output_kind=RequestOutputKind.DELTA,
    )


def _path(thing: Any) -> str:
    return _path_of(type(thing))


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
