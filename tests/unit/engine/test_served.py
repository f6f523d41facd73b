"""Test what a client reads from the streams of a server; `tests/engine/test_calibrate.py` starts a real one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.engine.calibration.served import (
    HttpClient,
    ServedLoads,
    Streamed,
    steps_with_prompts,
)
from vllm_omni_sched.sim.costs.fit import ServerStart


class Response:
    """A response with these lines."""

    def __init__(self, status: int, lines: list[bytes]) -> None:
        self.status, self._lines = status, lines

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def text(self) -> str:
        return b"".join(self._lines).decode()

    @property
    def content(self) -> AsyncIterator[bytes]:
        async def lines() -> AsyncIterator[bytes]:
            for line in self._lines:
                yield line

        return lines()


class Session:
    """Answers every request with one response, and keeps what was sent."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def post(self, url: str, data: bytes, headers: dict[str, str]) -> Response:
        self.sent.append((url, json.loads(data)))
        return self._response


def client(response: Response) -> tuple[HttpClient, Session]:
    session, ticks = Session(response), count()
    return HttpClient(session, "http://a", lambda: float(next(ticks))), session


def event(delta: dict[str, Any] | None, usage: dict[str, int] | None = None) -> bytes:
    choices = [] if delta is None else [{"delta": delta}]
    return f"data: {json.dumps({'choices': choices, 'usage': usage})}\n".encode()


@pytest.mark.asyncio
async def test_each_event_with_a_token_has_a_time_even_without_text() -> None:
    lines = [
        event({"role": "assistant", "content": ""}),
        b"\n",
        event({"content": "a"}),
        event({"content": ""}),
        event(None, {"prompt_tokens": 7, "completion_tokens": 2}),
        b"data: [DONE]\n",
    ]
    asks, session = client(Response(200, lines))
    answer = await asks.ask(asks.body("hello", 2))
    assert (answer.sent, answer.outputs) == (0.0, [2.0, 3.0])  # the clock counts events, the first is the role's
    assert (answer.prompt_tokens, answer.output_tokens) == (7, 2)
    ((url, body),) = session.sent
    assert url == "http://a/v1/chat/completions"
    assert (body["messages"], body["max_tokens"], body["stream"]) == ([{"role": "user", "content": "hello"}], 2, True)


@pytest.mark.asyncio
async def test_a_refusal_has_the_servers_reason() -> None:
    asks, _ = client(Response(400, [b"no chat template"]))
    with pytest.raises(ConfigError, match="the server refused a request: no chat template"):
        await asks.ask(asks.body("hello", 1))


def decoding(late: dict[int, float], outputs: int = 60) -> Streamed:
    """Return a request whose outputs come each 10 ms, with these seconds before some of them."""
    at, times = 0.0, []
    for number in range(outputs):
        at += 0.01 + late.get(number, 0.0)
        times.append(at)
    return Streamed(0.0, prompt_tokens=20, outputs=times)


def test_a_prompt_takes_the_usual_step_and_what_others_have_later() -> None:
    others = [decoding({20: 0.003, 21: 0.005}), decoding({20: 0.003, 21: 0.005})]
    # sent in the step before, and answered with the outputs of the step that is 5 ms longer
    prompt = Streamed(others[0].outputs[18] + 0.004, prompt_tokens=100, outputs=[others[0].outputs[21] + 0.001])
    (step,) = steps_with_prompts(others, [prompt])
    assert step.seconds == pytest.approx(0.018)
    assert (step.decodes, step.prefill_tokens, step.prefill_pairs) == (2, 100, 5000)
    assert step.context_tokens == 2 * (20 + 22)


@pytest.mark.asyncio
async def test_a_load_of_all_kinds_has_the_requests_of_all_clients_from_its_own_beginning() -> None:
    lines = [
        event({"content": "a"}),
        event({"content": "b"}),
        event(None, {"prompt_tokens": 7, "completion_tokens": 2}),
    ]
    asks, session = client(Response(200, lines))
    observed = ServerStart()
    loads = ServedLoads(asks, lambda: 0.0, lambda: "data:image/png;base64,", np.random.default_rng(1), observed)
    for of in (observed, ServerStart()):
        loads.observed = of
        await loads.mixed(2)
    ((*seen,),) = observed.mixed
    assert len(seen) == 12
    assert min(one.at for one in seen) == 0.0
    assert {(one.prompt_tokens, one.output_tokens) for one in seen} == {(7, 2)}
    assert all(one.seconds > 0 for one in seen)
    sent = [body["messages"][0]["content"] for _, body in session.sent[:12]]
    assert sorted(one.items for one in seen) == sorted(len(content) - 1 for content in sent)
    assert {len(content) for content in sent} == {1, 2}  # some have an image, others none
    assert len({content[-1]["text"] for content in sent}) == 12  # no prefix cache helps
