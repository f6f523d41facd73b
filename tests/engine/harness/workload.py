"""Describe what a scenario asks of an engine: plain requests and streaming sessions, with their arrivals and aborts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

IMAGE = "<image>"


@dataclass(frozen=True)
class Ask:
    """A request of a scenario.

    `images` are the numbers of its pictures (see `media.picture`), one for each `<image>` in `prompt`.
    `at_step`: it arrives before that step of the scenario (in a served engine: in that order).
    `abort_after`: the client leaves when it has seen that many tokens.
    `seed`: it samples at temperature 1, with this seed.
    `items_reversed`: its items reach the core last first, as no front end of vLLM would send them.
    """

    id: str
    prompt: str
    images: Sequence[int] = ()
    max_tokens: int = 8
    at_step: int = 0
    abort_after: int | None = None
    seed: int | None = None
    items_reversed: bool = False


@dataclass(frozen=True)
class Chunk:
    """An update of a streaming session."""

    prompt: str
    images: Sequence[int] = ()


@dataclass(frozen=True)
class Session:
    """A streaming session: every chunk is answered by `tokens_per_chunk` tokens.

    With `stops` the answer ends at the first token whose number divides by three, too.
    A chunk is sent `gap_steps` steps after the answer to the chunk before; with `backlog` all chunks are sent at once.
    `abort_after`: the client leaves when it has seen that many tokens; None lets it send the end of its input.
    """

    id: str
    chunks: Sequence[Chunk]
    tokens_per_chunk: int = 1
    at_step: int = 0
    gap_steps: int = 0
    backlog: bool = False
    stops: bool = False
    abort_after: int | None = None

    @property
    def num_items(self) -> int:
        return sum(len(chunk.images) for chunk in self.chunks)


@dataclass(frozen=True)
class Speech:
    """A realtime transcription: `frames` pieces of 80 ms of the sound with this `number`, one token for each."""

    id: str
    frames: int
    number: int = 0
    at_step: int = 0
    abort_after: int | None = None
    tokens_per_chunk: int = 1
    gap_steps: int = 0
    backlog: bool = False
    stops: bool = False


@dataclass(frozen=True)
class Straggler:
    """One more chunk for a session that has ended by then."""

    id: str
    session: str
    chunk: Chunk
    at_step: int
    abort_after: None = None


Request = Ask | Session | Speech | Straggler


@dataclass(frozen=True)
class Scenario:
    name: str
    requests: Sequence[Request]
    max_steps: int = 20_000


@dataclass
class Heard:
    """Answer to one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """natural logarithm of each token's probability: it shows a wrong context even where the token is the same"""
    finish_reason: str | None = None
    ends: list[str] = field(default_factory=list)
    """reasons for which answers ended: one, or that of each chunk of a session"""

    def extend(self, output) -> None:  # type: ignore[no-untyped-def]
        """Add one `CompletionOutput` of kind DELTA."""
        self.tokens += output.token_ids
        for token, logprobs in zip(output.token_ids, output.logprobs or (), strict=True):
            self.logprobs.append(logprobs[token].logprob)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.ends.append(output.finish_reason)

    def cut(self, count: int) -> None:
        """Keep what the client had seen when it left: how much more was on its way is a matter of timing."""
        del self.tokens[count:], self.logprobs[count:]
        self.finish_reason = "abort"
