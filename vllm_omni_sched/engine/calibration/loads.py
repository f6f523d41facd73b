"""The designed loads: each sends requests to the engine and adds the measured times to the observations."""

import asyncio
import itertools
import statistics
from collections.abc import Sequence

from vllm_omni_sched.engine.calibration.client import Answer, Client
from vllm_omni_sched.engine.calibration.prompts import Prompts
from vllm_omni_sched.sim.costs.fit import EncodePoint, FrontPoint, Observations, StepPoint, prefill_pairs

_SHORT = 16  # tokens of a prompt that is only there to decode
_WINDOW = 16  # steps that are compared with their median
_BESIDE = 4  # requests that decode beside what is measured
_HELD = 256  # tokens that each of them makes at most


class Loads:
    """The loads that calibrate one engine; they add to ``observed``."""

    def __init__(self, client: Client, prompts: Prompts, observed: Observations) -> None:
        self._client = client
        self._prompts = prompts
        self.observed = observed
        self._budget = client.config.scheduler_config.max_num_batched_tokens

    async def decodes(self, requests: int, context: int, tokens: int) -> None:
        """Measure decode steps: so many requests decode, with nothing else in the engine."""
        prompts = [self._prompts.tokens(context) for _ in range(requests)]
        answers = await asyncio.gather(*(self._client.ask(prompt, tokens) for prompt in prompts))
        since, until = max(a.steps[0] for a in answers), min(a.steps[-1] for a in answers)
        times = sorted({step for a in answers for step in a.steps if since <= step <= until})
        gaps = [after - before for before, after in itertools.pairwise(times)]
        for at in range(0, len(gaps) - _WINDOW + 1, _WINDOW):
            window = gaps[at : at + _WINDOW]
            usual = statistics.median(window)
            # counted since the last request began; the ones before it have generated a few tokens more
            read = requests * (context + 1 + at + _WINDOW // 2)
            self.observed.steps.append(StepPoint(requests, read, 0, 0.0, usual))
            self.observed.steadiness += [gap / usual for gap in window]

    async def prefill(self, length: int) -> float:
        """Measure the prefill of one prompt, alone; return the seconds of its steps."""
        answer = await self._client.ask(self._prompts.tokens(length))
        self._answered(answer)
        chunks = self._chunks(length)
        pairs = sum(prefill_pairs(start, tokens) for start, tokens in chunks)
        self.observed.steps.append(StepPoint(0, 0, length, pairs, answer.first_step_seconds, len(chunks)))
        return answer.first_step_seconds

    async def front(self, words: int) -> None:
        """Measure the front end's time for one text prompt, alone."""
        answer = await self._client.ask(self._prompts.text(words))
        self.observed.fronts.append(FrontPoint(answer.prompt_tokens, "", 0, answer.front_seconds))

    async def beside(self, lengths: Sequence[int]) -> None:
        """Measure prefills, one after the other, while other requests decode."""
        others = [asyncio.create_task(self._client.ask(self._prompts.tokens(_SHORT), _HELD)) for _ in range(_BESIDE)]
        await self._until_all_decode()
        asked = [await self._client.ask(self._prompts.tokens(length)) for length in lengths]
        decoding = await asyncio.gather(*others)
        for length, answer in zip(lengths, asked, strict=True):
            begun = [a for a in decoding if a.steps[0] < answer.scheduled and a.steps[-1] >= answer.steps[0]]
            if len(begun) < _BESIDE or length + _BESIDE > self._budget:
                continue  # some of the decoding requests had finished, or the prompt did not fit into one step
            before = max(step for a in begun for step in a.steps if step < answer.steps[0])
            read = sum(_SHORT + sum(step < answer.steps[0] for step in a.steps) for a in begun)
            seconds = answer.steps[0] - before
            self.observed.steps.append(StepPoint(_BESIDE, read, length, prefill_pairs(0, length), seconds))

    async def images(self, number: int) -> None:
        """Measure the encode of so many images: a prompt with them, against a text prompt of as many tokens."""
        answer = await self._client.ask(self._prompts.images(number))
        self._answered(answer)
        text = await self.prefill(answer.prompt_tokens)
        embeds = answer.prompt_tokens
        seconds = max(answer.first_step_seconds - text, 0.0)
        self.observed.encodes.append(EncodePoint("image", number, embeds, seconds))
        self.observed.fronts.append(FrontPoint(0, "image", number, answer.front_seconds))

    async def front_beside(self, number: int, words: Sequence[int]) -> None:
        """Measure front-end times of images and texts while others decode, and how much these decodes are delayed."""
        others = [asyncio.create_task(self._client.ask(self._prompts.tokens(_SHORT), _HELD)) for _ in range(2)]
        await self._until_all_decode()
        asked = [await self._client.ask(self._prompts.text(count)) for count in words]
        picture = await self._client.ask(self._prompts.images(number)) if number else None
        decoding = await asyncio.gather(*others)
        # the core takes a request on between two steps: it has waited for half of one
        step = statistics.median(after - before for a in decoding for before, after in itertools.pairwise(a.steps))
        for answer in asked:
            seconds = max(answer.front_seconds - step / 2, 0.0)
            self.observed.fronts.append(FrontPoint(answer.prompt_tokens, "", 0, seconds))
        if picture is None:
            return
        seconds = max(picture.front_seconds - step / 2, 0.0)
        self.observed.fronts.append(FrontPoint(0, "image", number, seconds))
        for a in decoding:
            usual = statistics.median(after - before for before, after in itertools.pairwise(a.outputs))
            until = [had for had, step in zip(a.outputs, a.steps, strict=True) if step <= picture.scheduled]
            # the gap in which the front end began counts whole
            began = max((i for i, had in enumerate(until) if had <= picture.called), default=0)
            during = until[began:]
            if len(during) > 1:
                more = max(during[-1] - during[0] - (len(during) - 1) * usual, 0.0)
                self.observed.front_stalls.setdefault("image", []).append(more / number)

    async def lane(self, number: int) -> None:
        """Measure the encode of images in the lane while others decode, on an engine with encode-ahead."""
        others = [asyncio.create_task(self._client.ask(self._prompts.tokens(_SHORT), _HELD)) for _ in range(_BESIDE)]
        await self._until_all_decode()
        picture = await self._client.ask(self._prompts.images(number))
        decoding = await asyncio.gather(*others)
        waited = picture.scheduled - picture.queued
        gaps = [(after - before, before, after) for a in decoding for before, after in itertools.pairwise(a.steps)]
        beside = [gap for gap, before, after in gaps if picture.queued <= before and after <= picture.scheduled]
        alone = [gap for gap, before, after in gaps if after <= picture.called or before > picture.steps[0]]
        if len(beside) < _WINDOW or not alone:
            return  # it was encoded in the step after all
        usual = statistics.median(alone)
        self.observed.lane_slowdowns.append(statistics.fmean(beside) / usual)
        # It is found to be ready at the end of a step; its prompt may begin as soon as its first image is there.
        encode = max(waited - statistics.fmean(beside) / 2, 0.0)
        self.observed.lane_encodes.append(EncodePoint("image", 1, picture.prompt_tokens // number, encode))

    def _answered(self, answer: Answer) -> None:
        self.observed.answers.append(max(answer.outputs[0] - answer.steps[0], 0.0))

    def _chunks(self, length: int) -> list[tuple[int, int]]:
        return [(start, min(self._budget, length - start)) for start in range(0, length, self._budget)]

    async def _until_all_decode(self) -> None:
        # as long as a short request takes: those before it have begun by then
        await self._client.ask(self._prompts.tokens(_SHORT), 8)
