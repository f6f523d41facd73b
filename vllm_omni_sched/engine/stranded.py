"""Keeps sessions that vLLM would lose."""

from typing import Any

from vllm.v1.request import Request

from vllm_omni_sched import compat


class StrandedSessionsMixin:
    """The part of `OmniSchedulerMixin` for sessions preempted while the token that ends their turn is in flight.

    Up to 0.32, vLLM takes such a session out of the waiting queue with all that has stopped, and when its next chunk
    comes it forgets every token that is not computed, which is all of them. The session then waits for ever.

    1. A session that goes on after it stopped while it was preempted is back in the queue when the step is done.
    2. Its next chunk replaces the last sampled token, as it does for a session that was not preempted.
    3. On a vLLM that keeps such sessions nothing is overridden, so that a step pays nothing for it.
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
            # Before 0.32 the hash of a block would stay that has the replaced token in it.
            del session.block_hashes[kept // compat.hash_block_size(self) :]
            super()._update_request_as_session(session, update)
            session.num_computed_tokens = 0


def _is_preempted(stopped: Request) -> bool:
    """Of a request that has sampled a token, and so had computed all before it."""
    return stopped.num_computed_tokens == 0
