"""Refusal of requests that reached the scheduler: each is answered with an error, and nothing else is touched."""

from collections import OrderedDict
from typing import Any

from vllm_omni_sched.engine.protocols import Request, Scheduler
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

_REMEMBERED = 4096


class Refusals:
    """Remembers the sessions that ended last, and the requests refused since the last step.

    1. A refused request is dropped before the next step is scheduled, and reported with its outputs.
    2. An update of a session that has ended is refused. vLLM would take it as the start of a new session, which then
       answers half a prompt. Request ids of sessions are unique (vLLM appends a random part), so a known id can only
       be a late update.
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

    def refuse(self, request_id: str, client_index: int) -> None:
        """Answer this request with an error; the reason has been logged."""
        self.refused[request_id] = client_index

    def drop(self, scheduler: Scheduler) -> None:
        """End the refused requests, before the next step is scheduled."""
        from vllm.v1.request import RequestStatus

        scheduler.finish_requests(list(self.refused), RequestStatus.FINISHED_ERROR)

    def report(self, outputs: dict[int, Any]) -> dict[int, Any]:
        """Add one error to a step's ``outputs``, by client, for each request that was refused before it."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        for request_id, client_index in self.refused.items():
            error = EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(error)
        self.refused.clear()
        return outputs
