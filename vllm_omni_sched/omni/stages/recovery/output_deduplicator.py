"""Send each output to the clients once, whatever was run again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm_omni.engine.messages import ErrorMessage, OutputMessage

from vllm_omni_sched.omni.stages.audio import num_samples, without_first_samples


@dataclass
class Emitted:
    """Counts the output that one stage has sent to a client, and how much of it a later run has repeated."""

    tokens: int = 0
    characters: int = 0
    whole: bool = False
    again: bool = False
    tokens_again: int = 0
    characters_again: int = 0
    samples: int = 0  # audio samples
    samples_again: int = 0
    chunks: int = 0  # other outputs without tokens: images
    chunks_again: int = 0


class OutputDeduplicator:
    """Drops repeated outputs before they reach vLLM-Omni's queue of outputs.

    1. A request ends once: messages after its last one, or after its error, are dropped.
    2. A stage that runs again does not repeat outputs; at temperature 0 its output is the same.
    3. A stage reports its end once. If it is the last one to end in a later run, its message ends
       the request, and contains nothing that the client already has. A streaming session ends with each input.

    Args:
        queue: vLLM-Omni's queue, of which only `put` is used.
        kind: returns the `RequestOutputKind` of a request at a stage, or None if unknown.
        streams: returns whether a request is a streaming session.
    """

    def __init__(
        self,
        queue: Any,
        kind: Callable[[str, int], RequestOutputKind | None],
        streams: Callable[[str], bool] = lambda request_id: False,
    ) -> None:
        self._queue, self._kind, self._streams = queue, kind, streams
        self._emitted: dict[str, dict[int, Emitted]] = {}
        self._ended: set[str] = set()
        self.dropped = 0

    async def put(self, message: Any) -> None:
        if isinstance(message, OutputMessage):
            kept = self._new_part(message)
        elif isinstance(message, ErrorMessage) and message.request_id is not None and message.event_id is None:
            kept = message if self._mark_ended(message.request_id) else None
        else:
            kept = message
        if kept is None:
            self.dropped += 1
            return
        await self._queue.put(kept)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def runs_again(self, stage_id: int, request_ids: Iterable[str]) -> None:
        """Record that the stage repeats its output from the beginning, for all requests that get it."""
        for request_id in request_ids:
            emitted = self._emitted.get(request_id, {}).get(stage_id)
            if emitted is not None:
                emitted.again, emitted.tokens_again, emitted.characters_again = True, 0, 0
                emitted.samples_again = emitted.chunks_again = 0

    def forget(self, request_id: str) -> None:
        """Forget a request that has left the orchestrator."""
        self._emitted.pop(request_id, None)
        self._ended.discard(request_id)

    def _mark_ended(self, request_id: str) -> bool:
        if request_id in self._ended:
            return False
        self._ended.add(request_id)
        return True

    def _new_part(self, message: OutputMessage) -> OutputMessage | None:
        request_id, stage_id = message.request_id, message.stage_id
        if request_id in self._ended:
            return None
        emitted = self._emitted.setdefault(request_id, {}).setdefault(stage_id, Emitted())
        output = message.engine_outputs
        completions = getattr(output, "outputs", None) or []
        finished = bool(getattr(output, "finished", False))
        if emitted.whole and not self._streams(request_id):
            if not message.finished:
                return None
            self._ended.add(request_id)
            return _only_ends(message, self._kind(request_id, stage_id))
        if emitted.again and completions:
            output = self._rest(output, emitted, self._kind(request_id, stage_id), finished)
            if output is None and not message.finished:
                return None
            if output is not None and output is not message.engine_outputs:
                message = copy.copy(message)
                message.engine_outputs = output
        elif completions:
            self._note(emitted, completions[0], self._kind(request_id, stage_id))
        emitted.whole = emitted.whole or finished
        if message.finished:
            self._ended.add(request_id)
        return message

    @staticmethod
    def _note(emitted: Emitted, completion: Any, kind: RequestOutputKind | None) -> None:
        tokens, characters = len(completion.token_ids or ()), len(completion.text or "")
        if kind is RequestOutputKind.DELTA:
            if not tokens and not characters:
                count = num_samples(completion)
                emitted.chunks += count is None
                emitted.samples += count or 0
            emitted.tokens += tokens
            emitted.characters += characters
        else:
            emitted.tokens, emitted.characters = max(emitted.tokens, tokens), max(emitted.characters, characters)

    def _rest(self, output: Any, emitted: Emitted, kind: RequestOutputKind | None, finished: bool) -> Any | None:
        """Return the new part of an output of a later run; None if there is none."""
        completion = output.outputs[0]
        if kind is not RequestOutputKind.DELTA:
            if not finished and len(completion.token_ids or ()) <= emitted.tokens:
                return None
            self._note(emitted, completion, kind)
            return output
        tokens, text = list(completion.token_ids or ()), completion.text or ""
        if not tokens and not text and (count := num_samples(completion)) is not None:
            old = min(max(emitted.samples - emitted.samples_again, 0), count)
            emitted.samples_again += count
            if old == count and not finished:
                return None
            emitted.samples = max(emitted.samples, emitted.samples_again)
            rest = copy.copy(output)
            rest.outputs = [without_first_samples(completion, old), *output.outputs[1:]]
            return rest
        if not tokens and not text:
            emitted.chunks_again += 1
            if emitted.chunks_again <= emitted.chunks and not finished:
                return None
            emitted.chunks = max(emitted.chunks, emitted.chunks_again)
            return output
        old_tokens = min(max(emitted.tokens - emitted.tokens_again, 0), len(tokens))
        old_characters = min(max(emitted.characters - emitted.characters_again, 0), len(text))
        emitted.tokens_again += len(tokens)
        emitted.characters_again += len(text)
        if not finished and old_tokens == len(tokens) and old_characters == len(text):
            return None
        rest = copy.copy(output)
        rest.outputs = [copy.copy(completion), *output.outputs[1:]]
        rest.outputs[0].token_ids, rest.outputs[0].text = tokens[old_tokens:], text[old_characters:]
        emitted.tokens, emitted.characters = (
            max(emitted.tokens, emitted.tokens_again),
            max(emitted.characters, emitted.characters_again),
        )
        return rest


def _only_ends(message: OutputMessage, kind: RequestOutputKind | None) -> OutputMessage:
    """Return only the end of a request, in a message of a stage that has already reported its end."""
    ends = copy.copy(message)
    ends.engine_outputs = output = copy.copy(message.engine_outputs)
    output.finished = False
    if kind is RequestOutputKind.DELTA and getattr(output, "outputs", None):
        output.outputs = _silent(output.outputs)
    return ends


def _silent(completions: Sequence[Any]) -> list[Any]:
    """Return the completions without content."""
    silent = [copy.copy(completion) for completion in completions]
    for completion in silent:
        completion.token_ids, completion.text, completion.finish_reason = [], "", None
        if hasattr(completion, "multimodal_output"):
            completion.multimodal_output = None
    return silent
