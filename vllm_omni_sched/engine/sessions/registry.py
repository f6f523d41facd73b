"""Streaming sessions of one scheduler: which requests are sessions, and what workers are told about them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_omni_sched import compat
from vllm_omni_sched.engine.protocols import Request
from vllm_omni_sched.engine.refusals import Refusals
from vllm_omni_sched.items import FeatureList

if TYPE_CHECKING:
    from vllm_omni_sched.engine.sessions.messages import SessionSender
    from vllm_omni_sched.engine.sessions.release import CommittedRelease


class Sessions:
    """Follows each session from its first request to its end.

    1. The first request of a session becomes one; an id that belongs to a session that has ended is refused.
    2. After each step the entries about sessions become messages with only what is new, and items that workers have
       consumed leave memory.
    3. A session that loses its blocks is sent in full next time.

    Args:
        refusals: remembers sessions that have ended.
        sender: makes the messages; None if workers take vLLM's own.
        release: moves data of consumed items out of memory; None to keep it. It needs the messages of ``sender``.
        track_blocks: called when a session begins, so that its block ids are looked up only when asked for.
    """

    __slots__ = ("_refusals", "_release", "_track_blocks", "ids", "sender")

    def __init__(
        self,
        refusals: Refusals,
        sender: "SessionSender | None" = None,
        release: "CommittedRelease | None" = None,
        track_blocks: Callable[[], None] | None = None,
    ) -> None:
        self._refusals = refusals
        self._release = release
        self._track_blocks = track_blocks
        self.sender = sender
        self.ids: set[str] = set()

    def begin(self, request: Request) -> None:
        """Take the first request of a session, whose items are a `FeatureList`."""
        self._refusals.refuse_late_update(request)
        features = request.mm_features
        assert isinstance(features, FeatureList)
        features.grows = True
        self.ids.add(request.request_id)
        if self.sender is not None:
            features.defer = True
            if self._track_blocks is not None:
                self._track_blocks()

    def end(self, request_id: str) -> None:
        """Drop all state of a session that has ended; do nothing for any other request.

        Sessions are known by their ids: vLLM clears ``resumable`` of a session that it ends with an error.
        """
        if request_id in self.ids:
            self.ids.remove(request_id)
            self.lost_blocks(request_id)
            self._refusals.session_ended(request_id)

    def lost_blocks(self, request_id: str) -> None:
        """Send the next message about this session in full."""
        if self.sender is not None:
            self.sender.forget(request_id)

    def scheduled(self, output: Any, requests: dict[str, Any]) -> None:
        """Replace the entries of a step that are about sessions."""
        if self.sender is not None and output.scheduled_new_reqs:
            self.sender.replace(output, requests)
            if self._release is not None:
                self._release.after(output, requests)


class StrandedSessions:
    """Ends the turns of sessions as vLLM 0.33 does, where an older one loses them or delivers too much.

    1. The token that ends a turn may be examined while further steps of the session are in flight. Their tokens are
       discarded; vLLM would deliver them as tokens of the next turn, or fail an assertion.
    2. A session that stops while it is preempted is put back into the queue at the end of the step; vLLM removes it
       together with all stopped requests.
    3. Its next chunk replaces the last sampled token, as for a session that was not preempted; vLLM would drop every
       token that is not computed, which is all of them, and the session would wait forever.
    """

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def stopped(self, request: Any, end: Callable[[Any], bool]) -> bool:
        """Return the answer of vLLM's method ``end``: whether the request is finished, now that it has stopped."""
        if request.resumable and compat.delivers_output_after_stop():
            _drop_output_in_flight(request)
        finished = end(request)
        if not finished and _is_preempted(request):
            self.requests.append(request)
        return finished

    def put_back(self, scheduler: Any) -> None:
        """Queue the sessions noted in this step, unless they are queued."""
        requests, self.requests = self.requests, []
        for request in requests:
            if not request.is_finished() and not compat.is_queued(scheduler, request):
                scheduler._enqueue_waiting_request(request)

    def extend(self, scheduler: Any, extend: Callable[[Any, Any], None], session: Any, update: Any) -> None:
        """Extend ``session`` with vLLM's method ``extend``, which is told that all but the last token are computed."""
        if not (compat.strands_preempted_sessions() and _is_preempted(session)):
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


def _drop_output_in_flight(session: Any) -> None:
    """Discard the output of this session's steps in flight, and what was counted as computed in them."""
    session.num_computed_tokens -= session.num_output_placeholders
    session.num_output_placeholders = 0
    session.spec_token_ids = []
    session.drop_stale_output = True
    session.num_stale_output_tokens = session.num_in_flight_tokens
