"""Refusal of requests that reached the scheduler: each is answered with an error, and nothing else is touched."""

from collections import OrderedDict
from typing import Any

from vllm_omni_sched.engine.protocols import Request, Scheduler
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

_REMEMBERED = 4096


class Refusals:
    """Remembers the sessions that ended last, and the requests refused since the last step.

    1. A refused request is dropped before the next step is scheduled, and reported with the next outputs.
    2. An update of a session that has ended is refused. vLLM would take it as the start of a new session, which then
       answers half a prompt. Request ids of sessions are unique (vLLM appends a random part), so a known id can only
       be a late update.
    3. An update that leaves a session no room for a token below ``max_model_len`` is refused, and the session ends.
       vLLM checks the length of a prompt only when a request comes; a session that outgrows the tables of its workers
       ends the engine.
    """

    def __init__(self) -> None:
        self._ended: OrderedDict[str, None] = OrderedDict()
        self.refused: dict[str, int] = {}  # request id -> client

    def session_ended(self, request_id: str) -> None:
        """Remember that this session has ended."""
        self._ended[request_id] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def refuse_late_update(self, request: Request) -> None:
        """Refuse ``request`` if it continues a session that has ended."""
        if request.request_id not in self._ended:
            return
        logger.error(
            "Session %s has ended; its update of %d tokens and %d items is refused. Start a new session.",
            request.request_id,
            request.num_prompt_tokens,
            len(request.mm_features),
        )
        self.refuse(request.request_id, request.client_index)

    def refuse_long_update(self, session: Any, update: Any, max_model_len: int) -> bool:
        """Return whether ``session`` ends because this update would make it too long."""
        num_kept = session.num_tokens - 1  # the update replaces the last sampled token
        num_new = len(update.prompt_token_ids or ())
        if num_kept + num_new < max_model_len:
            return False
        logger.error(
            "Session %s ends with an error: it has %d tokens, and an update of %d tokens and %d items leaves no room "
            "for an answer below max_model_len %d. Start a new session, or raise --max-model-len.",
            session.request_id,
            num_kept,
            num_new,
            len(update.mm_features or ()),
            max_model_len,
        )
        self.refuse(session.request_id, session.client_index)
        return True

    def refuse(self, request_id: str, client_index: int) -> None:
        """Answer this request with an error; the reason has been logged."""
        self.refused[request_id] = client_index

    def drop(self, scheduler: Scheduler) -> None:
        """End the refused requests, in front of the next step or report."""
        from vllm.v1.request import RequestStatus

        scheduler.finish_requests(list(self.refused), RequestStatus.FINISHED_ERROR)

    def report(self, scheduler: Scheduler, outputs: dict[int, Any]) -> dict[int, Any]:
        """End the refused requests, and add one error for each to a step's ``outputs``, by client."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        self.drop(scheduler)  # those that the step itself has refused, when it continued their sessions
        for request_id, client_index in self.refused.items():
            error = EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(error)
        self.refused.clear()
        return outputs
