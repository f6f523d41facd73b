"""Provide the chunks of sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from tests.engine.harness.media import as_float, picture, sound
from tests.engine.harness.workload import Session, Speech


class ChunkSource(Protocol):
    def next(self, answer: Sequence[int]) -> dict[str, Any] | None:
        """Return the next prompt, given the tokens that answered the last one, or None at the end."""

    def close(self) -> None: ...


def chunk_source(session: Session | Speech, model_config: Any) -> ChunkSource:
    return SpeechSource(session, model_config) if isinstance(session, Speech) else PictureSource(session)


def image_prompt(prompt: str, images: Sequence[int]) -> dict[str, Any]:
    if not images:
        return {"prompt": prompt}
    return {"prompt": prompt, "multi_modal_data": {"image": [picture(number) for number in images]}}


class PictureSource:
    def __init__(self, session: Session) -> None:
        self._chunks = iter(session.chunks)

    def next(self, answer: Sequence[int]) -> dict[str, Any] | None:
        chunk = next(self._chunks, None)
        return None if chunk is None else image_prompt(chunk.prompt, chunk.images)

    def close(self) -> None:
        pass


class SpeechSource:
    """Yields the frames of a realtime transcription, cut and padded by the model's own code, as vLLM's endpoint does.

    The token that answered a frame is part of the next prompt: a frame comes only after the answer to the one before.
    """

    def __init__(self, speech: Speech, model_config: Any) -> None:
        self._runner = asyncio.Runner()
        self._answers: asyncio.Queue[list[int]] = asyncio.Queue()
        self._prompts = speech_prompts(speech, self._answers, model_config)

    def next(self, answer: Sequence[int]) -> dict[str, Any] | None:
        if answer:
            self._answers.put_nowait(list(answer))
        return self._runner.run(self._next())

    async def _next(self) -> dict[str, Any] | None:
        return await anext(self._prompts, None)

    def close(self) -> None:
        self._runner.run(self._prompts.aclose())
        self._runner.close()  # with the tasks in which the model's code feeds itself


def speech_prompts(speech: Speech, answers: asyncio.Queue[list[int]], model_config: Any) -> AsyncGenerator[Any, None]:
    from vllm.model_executor.models.voxtral_realtime import VoxtralRealtimeGeneration

    async def speak() -> AsyncGenerator[Any, None]:
        for samples in sound(speech.number, speech.frames):
            yield as_float(samples)

    return VoxtralRealtimeGeneration.buffer_realtime_audio(speak(), answers, model_config)
