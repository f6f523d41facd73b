"""Refusal of updates that reach a session after its end: each is answered with an error, and nothing else is
touched.
"""

from collections import OrderedDict
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request

from vllm_omni_sched.logs import logger_name

logger = init_logger(logger_name(__name__))

_REMEMBERED = 4096


class EndedSessions:
    """Remembers the sessions that ended last, and the updates refused since the last step.

    vLLM takes an update for an unknown session as the start of a new session, which then answers half a prompt. Request
    ids of sessions are unique (vLLM appends a random part), so a known id can only be a late update.
    """

    def __init__(self) -> None:
        self._ended: OrderedDict[str, None] = OrderedDict()
        # Request id -> client: dropped before the next step is scheduled, and reported with its outputs.
        self.refused: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ended

    def add(self, request_id: str) -> None:
        self._ended[request_id] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def refuse(self, request: Request) -> None:
        """Refuse ``request``, which continues a session that has ended."""
        logger.error(
            "Session %s has ended; its update of %d tokens and %d items is refused. Start a new session.",
            request.request_id,
            request.num_prompt_tokens,
            len(request.mm_features),
        )
        self.refused[request.request_id] = request.client_index

    def report(self, outputs: dict[int, EngineCoreOutputs]) -> dict[int, EngineCoreOutputs]:
        """Add one error to a step's ``outputs`` for each update that was refused before it."""
        for request_id, client_index in self.refused.items():
            error: Any = EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(error)
        self.refused.clear()
        return outputs
