"""What leaves for the clients: each thing once, whatever was run again behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm.outputs import CompletionOutput, RequestOutput
from vllm_omni.engine.messages import ErrorMessage, OutputMessage
from vllm_omni.outputs.mm_outputs import MultimodalPayload

from tests.support.omni_stages import CUMULATIVE, DELTA, FINAL, FINAL_ONLY, Rig
from vllm_omni_sched.omni.stages.recovery.output_deduplicator import OutputDeduplicator

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]


class Client:
    """Puts together what it is told of the one request `r`."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.deduplicator = OutputDeduplicator(self.queue, lambda request_id, stage_id: kind)

    async def told(
        self, tokens: list[int], text: str, *, stage: int = 0, last: bool = False, ends: bool = False
    ) -> bool:
        """Whether a message gets through."""
        completion = CompletionOutput(0, text, tokens, None, None, finish_reason="stop" if last else None)
        output = RequestOutput("r", None, [1], None, [completion], finished=last)
        before = self.queue.qsize()
        await self.deduplicator.put(OutputMessage(request_id="r", stage_id=stage, engine_outputs=output, finished=ends))
        assert (completion.token_ids, completion.text) == (tokens, text), "the next stage reads this one too"
        return self.queue.qsize() > before

    async def says(self, script: str, upto: int) -> None:
        """A run from its beginning, a character and a token at a time, the last of which may be the end."""
        for i in range(1, upto + 1):
            last = i == len(script)
            if self.kind is DELTA:
                await self.told([i], script[i - 1], last=last, ends=last)
            elif self.kind is CUMULATIVE or last:
                await self.told(list(range(1, i + 1)), script[:i], last=last, ends=last)

    def put_together(self) -> tuple[list[int], str]:
        parts = [one.engine_outputs.outputs[0] for one in self.queue._queue]
        if self.kind is not DELTA:
            return list(parts[-1].token_ids), parts[-1].text
        return [token for one in parts for token in one.token_ids], "".join(one.text for one in parts)


SCRIPT = "a stage that runs again"


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
@pytest.mark.parametrize("died_after", [0, 1, 7, len(SCRIPT) - 1])
async def test_a_run_that_is_repeated_says_only_what_is_new(kind: Any, died_after: int) -> None:
    client = Client(kind)
    await client.says(SCRIPT, died_after)
    before = client.queue.qsize()
    client.deduplicator.runs_again(0, ["r"])
    await client.says(SCRIPT, died_after)
    assert client.queue.qsize() == before
    client.deduplicator.runs_again(0, ["r"])  # and once more
    await client.says(SCRIPT, len(SCRIPT))
    assert client.put_together() == (list(range(1, len(SCRIPT) + 1)), SCRIPT)
    assert [one.finished for one in client.queue._queue].count(True) == 1


async def test_a_delta_that_is_half_old_is_cut_in_the_middle() -> None:
    client = Client(DELTA)
    await client.told([1, 2, 3], "abc")
    client.deduplicator.runs_again(0, ["r"])
    assert not await client.told([1, 2], "ab")
    assert await client.told([3, 4, 5], "cde")
    assert client.put_together() == ([1, 2, 3, 4, 5], "abcde")


async def test_tokens_and_text_are_cut_each_for_itself() -> None:
    """A detokenizer holds text back until a character is whole."""
    client = Client(DELTA)
    await client.told([1, 2], "a")
    client.deduplicator.runs_again(0, ["r"])
    await client.told([1], "")
    await client.told([2, 3], "ab")
    assert client.put_together() == ([1, 2, 3], "ab")


async def test_what_comes_after_the_end_is_dropped() -> None:
    client = Client(CUMULATIVE)
    assert await client.told([1], "a", last=True, ends=True)
    assert not await client.told([1], "a", last=True, ends=True)
    await client.deduplicator.put(ErrorMessage(request_id="r", error="late"))
    assert (client.queue.qsize(), client.deduplicator.dropped) == (1, 2)


async def test_a_stage_that_was_whole_and_ends_the_request_when_it_runs_again_says_nothing_twice() -> None:
    """In async-chunk mode the stages of a second run may end in another order than those of the first."""
    client = Client(DELTA)
    assert await client.told([1, 2], "ab", stage=1, last=True)
    client.deduplicator.runs_again(1, ["r"])
    assert not await client.told([1], "a", stage=1)
    assert await client.told([2], "b", stage=1, last=True, ends=True)
    assert client.put_together() == ([1, 2], "ab")
    assert [one.finished for one in client.queue._queue] == [False, True]


async def test_what_a_stage_says_after_it_was_done_is_dropped_but_for_a_session() -> None:
    client = Client(CUMULATIVE)
    assert await client.told([1], "a", last=True)
    assert not await client.told([1], "a", last=True)
    session = Client(CUMULATIVE)
    session.deduplicator._streams = lambda request_id: True
    assert await session.told([1], "a", last=True)
    assert await session.told([2], "b", last=True)


async def test_a_repeated_stream_of_audio_goes_on_where_it_stopped() -> None:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    outlet = OutputDeduplicator(queue, lambda request_id, stage_id: DELTA)

    async def chunk(i: int) -> None:
        completion = CompletionOutput(0, "", [], None, None, finish_reason="stop" if i == 3 else None)
        completion.multimodal_output = {"audio": torch.full((4,), float(i))}
        output = RequestOutput("r", None, [1], None, [completion], finished=i == 3)
        await outlet.put(OutputMessage(request_id="r", stage_id=1, engine_outputs=output, finished=i == 3))

    await chunk(1)
    outlet.runs_again(1, ["r"])
    for i in (1, 2, 3):
        await chunk(i)
    heard = [float(one.engine_outputs.outputs[0].multimodal_output["audio"][0]) for one in queue._queue]
    assert heard == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("carrier", [dict, lambda given: MultimodalPayload.from_dict(given)], ids=["dict", "payload"])
async def test_sound_that_comes_in_other_portions_is_cut_in_the_middle(carrier: Any) -> None:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    outlet = OutputDeduplicator(queue, lambda request_id, stage_id: DELTA)

    async def portion(first: int, last: int) -> None:
        ends = last == 12
        completion = CompletionOutput(0, "", [], None, None, finish_reason="stop" if ends else None)
        completion.multimodal_output = carrier({"audio": torch.arange(first, last), "sr": 8000})
        output = RequestOutput("r", None, [1], None, [completion], finished=ends)
        await outlet.put(OutputMessage(request_id="r", stage_id=1, engine_outputs=output, finished=ends))

    await portion(0, 4)
    await portion(4, 8)
    outlet.runs_again(1, ["r"])
    for first in (0, 3, 6, 9):
        await portion(first, first + 3)
    heard = [one.engine_outputs.outputs[0].multimodal_output for one in queue._queue]
    assert [sample for one in heard for sample in one["audio"].tolist()] == list(range(12))
    assert {int(one["sr"]) for one in heard} == {8000}


async def test_of_an_aborted_request_its_client_gets_what_there_is_and_nothing_is_kept() -> None:
    async with Rig(FINAL) as rig:
        await rig.ask("a")
        await rig.step(0, "a")
        await rig.abort("a")
        assert len(rig.ends("a")) == 1
        assert not rig.left_over(), "or the next request of that name gets no answer"
