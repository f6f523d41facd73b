"""Worker messages of streaming sessions: a full message at the start, then only what is new.

vLLM re-sends a resumed session whole: all tokens, items and blocks, at each update (`NewRequestData`, vllm#58324). Here
the scheduler replaces that entry of its output by a `SessionDelta` after `super().schedule()` has made it, and the
model-runner mixin expands it into the full entry before its own `super()` sees it. vLLM's code is unaware of it on
either side.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request

from vllm_omni_sched.items import FeatureList, SessionMirror, SessionTracker
from vllm_omni_sched.items.session import BlockIds, SessionUpdate
from vllm_omni_sched.monitor.counts import SchedulerMetrics

_values = attrgetter(*(f.name for f in fields(NewRequestData)))


@dataclass
class SessionStart(NewRequestData):
    """A full message about a session, as `NewRequestData`; workers keep a mirror of it."""

    covered: int = 0


@dataclass
class SessionDelta(NewRequestData):
    """The new part of a session; ``mm_features`` has the new items only.

    A runner without our mixin cannot mistake it for a request: it has no prompt tokens and no prompt embeddings,
    which both runners refuse.
    """

    update: SessionUpdate | None = None


@dataclass
class ResumedRequestData(CachedRequestData):
    """`CachedRequestData` with the items, by request and id, that runner V1 must be sent again.

    vLLM strips covered items from the first message, and does not send them again when the request is preempted and
    restarted.
    """

    restored: dict[str, dict[int, Any]] = field(default_factory=dict)


def with_restored(data: CachedRequestData, restored: dict[str, dict[int, Any]]) -> ResumedRequestData:
    """Return ``data`` extended by the items to send again."""
    return ResumedRequestData(**{f.name: getattr(data, f.name) for f in fields(CachedRequestData)}, restored=restored)


_Held = TypeVar("_Held", SessionTracker, SessionMirror)


def _new_blocks(data: CachedRequestData, sessions: Mapping[str, _Held]) -> Iterator[tuple[str, _Held, BlockIds]]:
    """Yield request id, session and new blocks for each running request that is a session; used on both sides."""
    if not sessions:
        return
    for request_id, block_ids in zip(data.req_ids, data.new_block_ids, strict=True):
        session = sessions.get(request_id)
        if session is not None and block_ids is not None:
            yield request_id, session, block_ids


class SessionSender:
    """Replaces, on the scheduler's side, the messages to the workers about sessions.

    Args:
        strip: ``feature -> feature``, without data that no worker needs.
        metrics: counts the updates.
    """

    def __init__(self, strip: Callable[[Any], Any], metrics: SchedulerMetrics) -> None:
        self._strip = strip
        self.trackers: dict[str, SessionTracker] = {}
        self._metrics = metrics

    def __len__(self) -> int:
        return len(self.trackers)

    def forget(self, request_id: str) -> None:
        """Drop a session that has ended or lost its blocks: the next message about it is a full one."""
        self.trackers.pop(request_id, None)

    def replace(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        """Replace, in place, the entries of ``output.scheduled_new_reqs`` that belong to sessions."""
        new_reqs = output.scheduled_new_reqs
        for i, new in enumerate(new_reqs):
            request = requests.get(new.req_id)
            if request is not None and request.resumable:
                new_reqs[i] = self._message(new, request.mm_features)

    def _message(self, new: NewRequestData, features: FeatureList) -> NewRequestData:
        tracker = self.trackers.get(new.req_id)
        covered, num_items = features.advance(new.num_computed_tokens), len(features)
        # Runner V2 is sent generated tokens, too; a session between two turns has none.
        prompt, prefill = new.prompt_token_ids, new.prefill_token_ids
        plain = prompt is not None and (prefill is None or len(prefill) == len(prompt))
        if tracker is not None and plain:
            first_new, restored = tracker.num_items, {}
            if covered < tracker.covered:
                restored = {i: features[i] for i in range(covered, tracker.covered)}
            update = tracker.update(prompt, num_items, new.block_ids, covered, restored)
            if update is not None:
                self._metrics.session_updates_delta += 1
                return SessionDelta(
                    **{
                        **vars(new),
                        "prompt_token_ids": None,
                        "prefill_token_ids": None,
                        "block_ids": (),
                        "mm_features": features[first_new:],
                        "update": update,
                    }
                )
        self._metrics.session_updates_full += 1
        start = SessionStart(*_values(new), covered=covered)
        start.mm_features = features.as_sent(new.num_computed_tokens, self._strip)
        start.block_ids = tuple(list(group) for group in new.block_ids)
        if not plain:
            # Workers cannot keep a mirror of this session: its next message is a full one again.
            self.trackers.pop(new.req_id, None)
            return NewRequestData(*_values(start))
        self.trackers[new.req_id] = SessionTracker(len(prompt), num_items, start.block_ids, covered)
        return start

    def note_running(self, data: CachedRequestData) -> None:
        """Record the blocks that are sent to running requests."""
        for request_id, tracker, block_ids in list(_new_blocks(data, self.trackers)):
            if request_id in data.resumed_req_ids:
                self.forget(request_id)
            else:
                tracker.append_blocks(block_ids)

    def note_restored(self, request_id: str, covered: int) -> None:
        """Record that workers were sent items again, in a message about running requests."""
        tracker = self.trackers.get(request_id)
        if tracker is not None:
            tracker.covered = min(tracker.covered, covered)


class SessionReceiver:
    """Expands, on the worker's side, session messages into those that vLLM's runner expects."""

    def __init__(self, strip: Callable[[Any], Any]) -> None:
        self._strip = strip
        self._mirrors: dict[str, SessionMirror] = {}

    def __len__(self) -> int:
        return len(self._mirrors)

    def expand(self, output: SchedulerOutput) -> None:
        """Replace, in place, session messages in ``output`` by full `NewRequestData`.

        Raises:
            SessionOutOfSyncError: a delta does not continue what this worker holds.
        """
        for request_id in output.finished_req_ids:
            self._mirrors.pop(request_id, None)
        new_reqs = output.scheduled_new_reqs
        for i, new in enumerate(new_reqs):
            if isinstance(new, SessionDelta):
                new_reqs[i] = self._continue(new)
            elif isinstance(new, SessionStart):
                new_reqs[i] = self._start(new)
            else:
                self._mirrors.pop(new.req_id, None)
        data = output.scheduled_cached_reqs
        for request_id, mirror, block_ids in _new_blocks(data, self._mirrors):
            if request_id in data.resumed_req_ids:
                mirror.replace_blocks(block_ids)
            else:
                mirror.append_blocks(block_ids)

    def _start(self, new: SessionStart) -> NewRequestData:
        mirror = SessionMirror(new.prompt_token_ids, new.mm_features, new.block_ids, new.covered)
        self._mirrors[new.req_id] = mirror
        return self._full(new, mirror)

    def _continue(self, new: SessionDelta) -> NewRequestData:
        update = new.update
        assert update is not None
        # Without a mirror, apply() raises an error that names the cause.
        mirror = self._mirrors.get(new.req_id) or SessionMirror((), (), [() for _ in update.block_ids], 0)
        mirror.apply(update, new.mm_features, self._strip)
        return self._full(new, mirror)

    @staticmethod
    def _full(new: NewRequestData, mirror: SessionMirror) -> NewRequestData:
        full = NewRequestData(*_values(new))
        # Prompt logprobs make a tensor of the tokens, which needs a list.
        wants_list = new.sampling_params is not None and new.sampling_params.prompt_logprobs is not None
        full.prompt_token_ids = mirror.tokens.tolist() if wants_list else mirror.tokens
        full.prefill_token_ids = mirror.tokens
        full.mm_features = mirror.features
        full.block_ids = tuple(list(group) for group in mirror.block_ids)
        return full

    def restore(self, request_id: str, restored: dict[int, Any], features: list[Any] | None) -> None:
        """Restore the data of a preempted request's items; ``features`` is the runner's own list."""
        mirror = self._mirrors.get(request_id)
        if mirror is not None:
            mirror.restore(restored)
        if features is not None and (mirror is None or features is not mirror.features):
            for i, feature in restored.items():
                features[i] = feature
