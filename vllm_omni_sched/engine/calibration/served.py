"""Runs `vllm serve`, and measures over HTTP what a client waits for besides the steps of the engine."""

import asyncio
import base64
import io
import itertools
import json
import math
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.fit import (
    ServedAnswers,
    ServedFirst,
    ServedRequest,
    ServerStart,
    StepPoint,
    prefill_pairs,
)

_START_SECONDS = 1800.0
_GRACE_SECONDS = 30.0
_NAME = "calibrated"
_DECODES, _BEHIND = (1, 2, 4, 16), (1, 4)  # requests with a short and with a long context
_TOKENS, _FEW_TOKENS = 96, 8  # of each answer of a load
_IDLE_SECONDS = 0.2  # before a request that is alone: an idle server takes longer than one that has just answered
_SKIPPED = 4  # outputs of a request, until all of a load have begun
_WINDOW = 16  # steps that are compared with their median
_BESIDE, _HELD = 2, 192  # requests that decode beside prompts, and their tokens
_BETWEEN_SECONDS = 0.05  # before each of these prompts, at least
_WORDS = (4, 16, 64, 128)
_CLIENTS, _TURNS = 4, 6  # of a mixed load; requests of each client
_ANSWERS = (8, 64)  # tokens of its answers
_WITH_IMAGE = 1 / 3  # of its requests
_PAUSE = 1.0  # of a client behind an answer, on average, relative to what that took


@dataclass
class Streamed:
    """Times of one streamed answer, in seconds of one clock.

    Attributes:
        sent: when the client began to send the request.
        outputs: for each event with tokens, when the client had it. Their text may be empty.
    """

    sent: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    outputs: list[float] = field(default_factory=list)


class HttpClient:
    """Sends streamed chat requests to one server of vLLM."""

    def __init__(self, session: Any, url: str, clock: Clock, model: str = _NAME) -> None:
        self._session, self._url, self._clock, self._model = session, url, clock, model

    def body(self, content: Any, output_tokens: int) -> bytes:
        """Return the body of a request; ``content``: of its message, as OpenAI's API defines it."""
        return json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": output_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()

    async def ask(self, body: bytes) -> Streamed:
        """Send a request and read its answer to the end; events are parsed when it is complete.

        Raises:
            ConfigError: the server refuses the request; the message has its reason.
        """
        events: list[tuple[float, bytes]] = []
        headers = {"Content-Type": "application/json"}
        answer = Streamed(self._clock())
        async with self._session.post(f"{self._url}/v1/chat/completions", data=body, headers=headers) as response:
            if response.status != 200:
                raise ConfigError(f"the server refused a request: {(await response.text())[:500]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    events.append((self._clock(), line))
        for at, line in events:
            event = json.loads(line[len(b"data: ") :])
            if any("role" not in choice["delta"] for choice in event.get("choices", ())):
                answer.outputs.append(at)
            if event.get("usage"):
                answer.prompt_tokens = event["usage"]["prompt_tokens"]
                answer.output_tokens = event["usage"]["completion_tokens"]
        return answer


class ServedLoads:
    """Designed loads for one start of a server; they add to ``observed``.

    Args:
        cpu_seconds: returns the processor time of the API server so far.
        image: returns the data URL of a new image; None if the model takes none.
        random: draws lengths: prompts of one repeated length run faster than others.
    """

    def __init__(
        self,
        client: HttpClient,
        cpu_seconds: Callable[[], float],
        image: Callable[[], str] | None,
        random: Any,
        observed: ServerStart,
    ) -> None:
        self._client, self._cpu_seconds, self._image, self._random = client, cpu_seconds, image, random
        self.observed = observed

    async def decodes(self, requests: int, words: int) -> None:
        """Measure steps as clients see them, and the API server's processor time, while so many requests decode.

        ``words``: of the prompt of each.
        """
        body = self._client.body(_words(words), _TOKENS)
        before = self._cpu_seconds()
        answers = await asyncio.gather(*(self._client.ask(body) for _ in range(requests)))
        cpu = self._cpu_seconds() - before
        gaps: list[float] = []
        for answer in answers:
            own = [after - at for at, after in itertools.pairwise(answer.outputs[_SKIPPED:])]
            gaps += own
            for at in range(0, len(own) - _WINDOW + 1, _WINDOW):
                usual = statistics.median(own[at : at + _WINDOW])
                if usual > 0:
                    self.observed.steadiness += [gap / usual for gap in own[at : at + _WINDOW]]
        if not gaps:
            return  # the server sent all tokens in a few events
        read = requests * (answers[0].prompt_tokens + _TOKENS // 2)
        outputs = sum(len(answer.outputs) for answer in answers)
        # the mean: a late event makes the next gap shorter, and the median would forget it
        step = statistics.fmean(gaps)
        self.observed.steps.append(StepPoint(requests, read, 0, 0.0, step))
        self.observed.answers.append(ServedAnswers(requests, _TOKENS, outputs, cpu))

    async def answers(self, requests: int) -> None:
        """Measure the API server's processor time of short answers, to tell that of requests from that of outputs."""
        body = self._client.body(_words(_WORDS[0]), _FEW_TOKENS)
        before = self._cpu_seconds()
        found = await asyncio.gather(*(self._client.ask(body) for _ in range(requests)))
        cpu, outputs = self._cpu_seconds() - before, sum(len(answer.outputs) for answer in found)
        self.observed.answers.append(ServedAnswers(requests, _FEW_TOKENS, outputs, cpu))

    async def first(self, words: int, images: int) -> None:
        """Measure the time to the first token of one request, alone, of about so many words."""
        words = max(round(words * self._random.uniform(0.8, 1.2)), 1)
        await asyncio.sleep(_IDLE_SECONDS)
        answer = await self._client.ask(self._client.body(self._content(_words(words), images), 1))
        seconds = answer.outputs[0] - answer.sent
        self.observed.firsts.append(ServedFirst(answer.prompt_tokens, "image" if images else "", images, seconds))

    async def beside(self, words: Sequence[int]) -> None:
        """Measure how much later the outputs of decoding requests come because of a prompt, one after the other."""
        body = self._client.body(_words(_WORDS[0]), _HELD)
        others = [asyncio.create_task(self._client.ask(body)) for _ in range(_BESIDE)]
        asked = []
        for number in words:
            await asyncio.sleep(_BETWEEN_SECONDS * self._random.uniform(1.0, 2.0))
            text = _words(max(round(number * self._random.uniform(0.8, 1.2)), 1))
            asked.append(await self._client.ask(self._client.body(text, 1)))
        decoding = await asyncio.gather(*others)
        self.observed.steps += steps_with_prompts(decoding, asked)

    async def mixed(self, clients: int) -> None:
        """Measure whole answers of clients, each of which sends one request of any kind after the other."""
        kinds = [[self._any_kind() for _ in range(_TURNS)] for _ in range(clients)]
        pauses = self._random.exponential(_PAUSE, (clients, _TURNS)).tolist()
        seen: list[tuple[Streamed, int]] = []

        async def client(own: Sequence[tuple[bytes, int]], waits: Sequence[float]) -> None:
            for (body, images), wait in zip(own, waits, strict=True):
                answer = await self._client.ask(body)
                seen.append((answer, images))
                await asyncio.sleep(wait * (answer.outputs[-1] - answer.sent))

        await asyncio.gather(*map(client, kinds, pauses))
        began = min(answer.sent for answer, _ in seen)
        self.observed.mixed.append(
            [
                ServedRequest(
                    answer.sent - began,
                    answer.prompt_tokens,
                    "image" if images else "",
                    images,
                    answer.output_tokens,
                    answer.outputs[-1] - answer.sent,
                )
                for answer, images in seen
            ]
        )

    def _any_kind(self) -> tuple[bytes, int]:
        """Return the body of a request whose kind and sizes are drawn, and the number of its images."""
        words = round(math.exp(self._random.uniform(*map(math.log, (_WORDS[0], _WORDS[-1])))))
        text = " ".join(map(str, self._random.integers(10, 99, words)))  # a prefix cache does not help it
        images = int(self._image is not None and self._random.random() < _WITH_IMAGE)
        return self._client.body(self._content(text, images), int(self._random.integers(*_ANSWERS))), images

    def _content(self, text: str, images: int) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        for _ in range(images):
            assert self._image is not None, "the model takes no images"
            content.insert(0, {"type": "image_url", "image_url": {"url": self._image()}})
        return content

    def all(self, most_requests: int) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """Return the loads with their names."""
        found: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            (f"server, {n} decoding", partial(self.decodes, n, _WORDS[0])) for n in _DECODES if n <= most_requests
        ]
        found += [
            (f"server, {n} decoding behind {_WORDS[-1]} words", partial(self.decodes, n, _WORDS[-1]))
            for n in _BEHIND
            if n <= most_requests
        ]
        found.append(("server, short answers", partial(self.answers, min(_DECODES[-1], most_requests))))
        found += [(f"server, {n} words", partial(self.first, n, 0)) for n in _WORDS]
        if most_requests > _BESIDE:
            found.append(("server, prompts beside decoding", partial(self.beside, _WORDS)))
        if self._image is not None:
            found.append(("server, an image", partial(self.first, _WORDS[0], 1)))
        found.append(("server, requests of all kinds", partial(self.mixed, min(_CLIENTS, most_requests))))
        return found


def steps_with_prompts(decoding: Sequence[Streamed], asked: Sequence[Streamed]) -> list[StepPoint]:
    """Return the step of each prompt that was computed beside decoding requests, as their clients see it.

    Its seconds are those of a usual step, and those by which outputs came later than after as many usual steps, from
    when the prompt was sent until half a usual step behind its first token. Prompts beside which not all of the
    requests decoded are left out.
    """
    during = [(one.sent, one.outputs[0]) for one in asked]
    found = []
    for one, (sent, first) in zip(asked, during, strict=True):
        late, usual_gaps = [], []
        for other in decoding:
            at = other.outputs[_SKIPPED:]
            gaps = [
                until - since
                for since, until in itertools.pairwise(at)
                if not any(since < ended and began < until for began, ended in during)
            ]
            if not gaps or not at[0] < sent:
                continue
            usual = statistics.fmean(gaps)
            last = max(i for i, had in enumerate(at) if had < sent)
            then = next((i for i, had in enumerate(at) if had > first + usual / 2), None)
            if then is not None:
                late.append(at[then] - at[last] - (then - last) * usual)
                usual_gaps.append(usual)
        if len(late) < len(decoding):
            continue
        seconds = statistics.fmean(usual_gaps) + statistics.fmean(late)
        read = sum(other.prompt_tokens + sum(had < first for had in other.outputs) for other in decoding)
        pairs = prefill_pairs(0, one.prompt_tokens)
        if seconds > 0:
            found.append(StepPoint(len(decoding), read, one.prompt_tokens, pairs, seconds))
    return found


def image_url(random: Any, size: tuple[int, int]) -> str:
    """Return an image of noise of this width and height as a data URL."""
    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(random.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _words(number: int) -> str:
    return " ".join(["word"] * number)


def words_of(arguments: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as words of `vllm serve`."""
    found = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            found += [f"--{option}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return found


class ApiServer:
    """Runs one `vllm serve`. ``url``: where it listens."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, log: IO[bytes], clock: Clock) -> None:
        self._process, self.url, self._log, self._clock = process, url, log, clock

    async def wait(self, session: Any) -> None:
        """Return when it answers.

        Raises:
            ConfigError: it has ended, or does not answer in time; the message has the end of its log.
        """
        until = self._clock() + _START_SECONDS
        while self._clock() < until:
            if self._process.poll() is not None:
                raise ConfigError(f"vllm serve ended by itself: {self._last_lines()}")
            with suppress(OSError, asyncio.TimeoutError):
                async with session.get(f"{self.url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.5)
        raise ConfigError(f"vllm serve did not answer within {_START_SECONDS:g} seconds")

    def cpu_seconds(self) -> float:
        """Return the processor time of the API server so far, without the engine's processes."""
        import psutil

        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return " | ".join(line.strip() for line in lines[-5:])


@contextmanager
def serving(model: str, arguments: Mapping[str, Any], clock: Clock) -> Iterator[ApiServer]:
    """Run `vllm serve` with these engine arguments for the duration of the block.

    Raises:
        ConfigError: the command `vllm` is not beside this interpreter.
    """
    program = Path(sys.executable).with_name("vllm")
    if not program.is_file():
        raise ConfigError(f"there is no command {program}: install vLLM with its command, or leave out --server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command: Sequence[str] = [
        *(str(program), "serve", model, "--served-model-name", _NAME, "--host", "127.0.0.1", "--port", str(port)),
        *words_of(arguments),
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield ApiServer(process, f"http://127.0.0.1:{port}", log, clock)
        finally:
            process.terminate()  # it ends its engine
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
