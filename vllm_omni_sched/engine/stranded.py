"""A fix for sessions that vLLM would lose."""

from typing import Any

from vllm.v1.request import Request

from vllm_omni_sched import compat


class StrandedSessionsMixin:
    """Keeps sessions that are preempted while the token that ends their turn is in flight.

    Up to 0.32, vLLM removes such a session from the waiting queue together with all stopped requests. When its next
    chunk comes, vLLM drops every token that is not computed, which is all of them. The session then waits forever.

    1. A session that continues after it stopped while preempted is put back into the queue at the end of the step.
    2. Its next chunk replaces the last sampled token, as for a session that was not preempted.
    3. On a vLLM that keeps such sessions nothing is overridden, so that a step pays nothing for this.
    """

    _omni_stranded: tuple[Request, ...] = ()

    if compat.strands_preempted_sessions():

        def _handle_stopped_request(self, request: Request) -> bool:
            finished: bool = super()._handle_stopped_request(request)
            if not finished and _is_preempted(request):
                self._omni_stranded += (request,)
            return finished

        def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().update_from_output(*args, **kwargs)
            if self._omni_stranded:
                stranded, self._omni_stranded = self._omni_stranded, ()
                for request in stranded:
                    if not request.is_finished() and not compat.is_queued(self, request):
                        self._enqueue_waiting_request(request)
            return outputs

        def _update_request_as_session(self, session: Request, update: Any) -> None:
            if not _is_preempted(session):
                super()._update_request_as_session(session, update)
                return
            session.num_computed_tokens = kept = session.num_tokens - 1
            # Before 0.32, the hash of the block with the replaced token would be kept.
            del session.block_hashes[kept // compat.hash_block_size(self) :]
            super()._update_request_as_session(session, update)
            session.num_computed_tokens = 0


def _is_preempted(stopped: Request) -> bool:
    """Return whether a stopped request is preempted: it has sampled a token, so all before it had been computed."""
    return stopped.num_computed_tokens == 0
