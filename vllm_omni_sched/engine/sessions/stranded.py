"""Sessions that vLLM up to 0.32 would lose: those preempted while the token that ends their turn is in flight."""

from collections.abc import Callable
from typing import Any

from vllm_omni_sched import compat


class StrandedSessions:
    """Keeps sessions that are preempted while the token that ends their turn is in flight.

    Up to 0.32, vLLM removes such a session from the waiting queue together with all stopped requests. When its next
    chunk comes, vLLM drops every token that is not computed, which is all of them. The session then waits forever.

    1. A session that continues after it stopped while preempted is put back into the queue at the end of the step.
    2. Its next chunk replaces the last sampled token, as for a session that was not preempted.
    """

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def stopped(self, request: Any, finished: bool) -> bool:
        """Note a request that has stopped, and return ``finished``: whether vLLM ends it."""
        if not finished and _is_preempted(request):
            self.requests.append(request)
        return finished

    def put_back(self, scheduler: Any) -> None:
        """Queue the sessions noted in this step, unless they are queued."""
        requests, self.requests = self.requests, []
        for request in requests:
            if not request.is_finished() and not compat.is_queued(scheduler, request):
                scheduler._enqueue_waiting_request(request)

    def update(self, scheduler: Any, extend: Callable[[Any, Any], None], session: Any, update: Any) -> None:
        """Extend ``session`` with vLLM's method ``extend``, which is told that all but the last token are computed."""
        if not _is_preempted(session):
            extend(session, update)
            return
        session.num_computed_tokens = kept = session.num_tokens - 1
        # Before 0.32, the hash of the block with the replaced token would be kept.
        del session.block_hashes[kept // compat.hash_block_size(scheduler) :]
        extend(session, update)
        session.num_computed_tokens = 0


def _is_preempted(stopped: Any) -> bool:
    """Return whether a stopped request is preempted: it has sampled a token, so all before it had been computed."""
    return bool(stopped.num_computed_tokens == 0)
