"""Read streams of completions over HTTP, and note when each of their tokens has come."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.harness.server import MODEL_NAME
from benchmarks.streaming.probe import REQUEST_ID

PREFIX = b"data: {"
PROMPT = "stream {} of a server on a few cores tells"


@dataclass(frozen=True)
class Stream:
    """Holds an answer as the client had it.

    Attributes:
        sent: when the client began to send the request, in seconds of the monotonic clock.
        at: when it had each event.
        tokens: the ids of the tokens of each event.
    """

    sent: float
    at: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def ttft(self) -> float:
        """Return the time to the first token, in seconds."""
        return self.at[0] - self.sent

    @property
    def token_ids(self) -> list[int]:
        """Return the ids of all tokens."""
        return list(itertools.chain.from_iterable(self.tokens))

    def gaps(self, at: Sequence[float] = ()) -> list[float]:
        """Return the times between each token and the one before, in seconds; 0 within an event.

        Args:
            at: when each event was somewhere else than at the client.
        """
        times = [when for when, own in zip(at or self.at, self.tokens, strict=True) for _ in own]
        return [after - before for before, after in itertools.pairwise(times)]


def read(sent: float, lines: Sequence[tuple[float, bytes]], tokens: int) -> Stream:
    """Return the stream that the client has read, as lines with their times.

    Raises:
        SystemExit: it has not so many tokens.
    """
    at: list[float] = []
    found: list[tuple[int, ...]] = []
    for seconds, line in lines:
        if line.startswith(PREFIX):
            choices = json.loads(line[len(PREFIX) - 1 :])["choices"]
            if new := tuple(token for choice in choices for token in choice["token_ids"] or ()):
                at.append(seconds)
                found.append(new)
    if (number := sum(map(len, found))) != tokens:
        raise SystemExit(f"a stream had {number} tokens instead of {tokens}: {lines[-1:]}")
    return Stream(sent, tuple(at), tuple(found))


def request_id(name: str, at: int) -> str:
    """Return the id of the request with this position among those of one call."""
    return f"{name}-{at}"


def streams(url: str, number: int, tokens: int, name: str) -> list[Stream]:
    """Stream so many completions at once. The prompts are the same in each call; `request_id` has the ids.

    Raises:
        SystemExit: the server refuses a request, or answers with fewer tokens.
    """
    return asyncio.run(_streams(url, number, tokens, name))


async def _streams(url: str, number: int, tokens: int, name: str) -> list[Stream]:
    body = {"model": MODEL_NAME, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [body | {"return_token_ids": True, "prompt": PROMPT.format(at)} for at in range(number)]
    gc.collect()
    gc.freeze()  # a collection would delay what is read meanwhile
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        # events are parsed when all have come
        address = f"{url}/v1/completions"
        asked = [_lines(session, address, request_id(name, at), body) for at, body in enumerate(bodies)]
        found = await asyncio.gather(*asked)
    return [read(sent, lines, tokens) for sent, lines in found]


async def _lines(
    session: aiohttp.ClientSession, url: str, name: str, body: dict[str, object]
) -> tuple[float, list[tuple[float, bytes]]]:
    lines: list[tuple[float, bytes]] = []
    sent = time.monotonic()
    async with session.post(url, json=body, headers={REQUEST_ID: name}) as answer:
        if answer.status != 200:
            raise SystemExit(f"the server refused a request: {(await answer.text())[:500]}")
        async for line in answer.content:
            lines.append((time.monotonic(), line))
    return sent, lines
