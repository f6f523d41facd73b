"""Ask a pipeline whose stages are scheduled: many equal requests, and deaths of replicas under load.

Each returns `{"answers": {request: answer}, …}`, an answer as `asking.answer_to` gives it and `ends`: how often each
stage said that the request was done.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from prometheus_client import REGISTRY

from dev.omni_cpu.asking import Ask, sampling_params, take
from dev.omni_cpu.spec import PipelineSpec

MERGED = Ask("What is asked by many at a time.", thinks=80, says=100)
STAGE_ASKS = {
    "merged": MERGED,
    "other": Ask("What some others ask.", thinks=70, says=90),
    "parted": MERGED._replace(says=85),  # the same for the thinker only
    "handed over": Ask("The first who asks this does not stay.", thinks=160, says=170),
}
CROWD = {
    f"crowd {number}": Ask(
        f"Number {number} of many" + " and more" * (number % 7), 12 + number % 9, 21 + 7 * number % 30
    )
    for number in range(16)
}
FULL = 32  # requests that a stage runs at once where `crowded` is asked
CROWDED = {f"crowded {number}": Ask(f"Number {number} of a crowd.", 60 + number % 5, 150) for number in range(48)}
# short sounds: the vocoder takes up to `FULL` of them in one step, and cannot begin with a part of an input
LIMITED = {f"limited {number}": Ask(f"Number {number} of a crowd.", 60 + number % 5, 20) for number in range(48)}
MANY = 6
LEAVE_AFTER_TOKENS = 8
UNTIL_SECONDS = 120
METRICS = "vllm:omni_sched_stage_"

Result = dict[str, Any]


async def undisturbed(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Ask all that the other scenarios ask."""
    return {"answers": await ask_all(omni, spec, prefix, STAGE_ASKS | CROWD)}


async def merged(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Send many equal requests at a time, and some others."""
    asks = {f"merged {number}": STAGE_ASKS["merged"] for number in range(MANY)}
    asks |= {f"other {number}": STAGE_ASKS["other"] for number in range(MANY // 2)}
    with counted(omni) as submitted:
        return {"answers": await ask_all(omni, spec, prefix, asks), "submitted": submitted}


async def parting(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Send requests that are equal for the thinker and differ for the talker."""
    asks = {f"{name} {number}": STAGE_ASKS[name] for number in range(2) for name in ("merged", "parted")}
    with counted(omni) as submitted:
        return {"answers": await ask_all(omni, spec, prefix, asks), "submitted": submitted}


async def handed_over(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Abort the first of three equal requests when the two others have joined it."""
    queue, ask = omni.engine.stage_pools[0].queue, STAGE_ASKS["handed over"]
    joined = asyncio.Event()
    with counted(omni) as submitted:
        leaving = asyncio.create_task(_leave(omni, spec, f"{prefix}-leaving", ask, joined))
        await until(lambda: queue.running)
        staying = asyncio.create_task(
            ask_all(omni, spec, prefix, {f"handed over {number}": ask for number in range(2)})
        )
        await until(lambda: sum(len(queue.receivers(name)) for name in list(queue.running)) == 3)
        joined.set()
        await leaving
        return {"answers": await staying, "submitted": submitted}


async def crowded(omni: Any, spec: PipelineSpec, prefix: str, asks: Mapping[str, Ask] = CROWDED) -> Result:
    """Ask more at a time than the stages run at once: how many requests each step had, and how many had no output."""
    with stepped(omni) as (steps, prefills):
        answers = await ask_all(omni, spec, prefix, asks)
    widest = {stage: max(sizes) for stage, sizes in steps.items() if sizes}
    return {"answers": answers, "widest": widest, "prefills": prefills}


async def killed(omni: Any, spec: PipelineSpec, prefix: str, *, stage_id: int) -> Result:
    """SIGKILL for the first replica of a stage in the middle of its work; then, the replica being back, all again.

    What is submitted is counted until the first answers are there, and not in a replica that is started meanwhile.
    """
    pool = omni.engine.stage_pools[stage_id]
    before = pool.live_replica_ids()
    with counted(omni) as submitted, payloads_taken_back(omni) as (looked_for, found):
        answers = asyncio.create_task(ask_all(omni, spec, f"{prefix}-once", CROWD))
        await until(lambda: in_the_middle(pool))
        lost = sum(work.replica_id == 0 for work in list(pool.queue.running.values()))
        for process in pool.clients[0].resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)
        result = {"answers": await answers, "lost": lost, "submitted": submitted}
    result |= {"looked_for": looked_for[stage_id], "held": sorted(found[stage_id])}
    result["unsent"] = sorted(set(looked_for[stage_id + 1]) - found[stage_id + 1])  # unless they had just arrived
    await until(lambda: pool.live_replica_ids() == before)
    return result | {"again": await ask_all(omni, spec, f"{prefix}-again", CROWD)}


async def told(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Return the metrics and what is left in the queues, after one more request that the metrics must count."""
    before = _finished(spec)
    answers = await ask_all(omni, spec, prefix, {"other": STAGE_ASKS["other"]})
    await until(lambda: _finished(spec) > before)
    pools = omni.engine.stage_pools
    await until(lambda: not any(held(pool) for pool in pools))
    # the page is written once a second
    await until(lambda: not any(value for name, _, value in samples() if name in ("waiting", "running")))
    # the memory of replicas that have just moved is measured once a second, too
    await until(lambda: len(_measured()) == len(pools))
    return {"answers": answers, "metrics": [[name, labels, value] for name, labels, value in samples()]}


def _measured() -> set[str]:
    """Return the stages whose memory is known."""
    return {labels["stage"] for name, labels, value in samples() if name == "host_memory_bytes" and value > 0}


async def connected(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """Which connector each stage was given; messages were sent over the arena."""
    answers = await ask_all(omni, spec, prefix, {"other": STAGE_ASKS["other"]})
    configs = [pool.stage_vllm_config.model_config.stage_connector_config for pool in omni.engine.stage_pools]
    await until(lambda: _arena_messages() > 0)  # stages write their pages once a second
    return {"answers": answers, "connectors": [config["name"] for config in configs]}


SMALL, LARGE = Ask("How do you do?", thinks=5, says=6), Ask("What crosses an edge " * 110, thinks=5, says=6)


async def sized(omni: Any, spec: PipelineSpec, prefix: str) -> Result:
    """What connectors count of a request with few hidden states, and of one that has more than a megabyte of them."""
    found: dict[str, dict[str, float]] = {}
    names = ("connector_messages_total", "connector_inline_messages_total", "connector_sent_bytes_total")
    for name, ask in {"small": SMALL, "large": LARGE}.items():
        before = {each: _of_arena(each) for each in names}
        least = before[names[0]] + len(spec.edges)
        await ask_all(omni, spec, f"{prefix}-{name}", {name: ask})
        # stages write their pages once a second
        await until(partial(_has_sent, least))
        found[name] = {each: _of_arena(each) - before[each] for each in names}
    configs = [pool.stage_vllm_config.model_config.stage_connector_config for pool in omni.engine.stage_pools]
    return {"counted": found, "connectors": [config["name"] for config in configs]}


def _has_sent(messages: float) -> bool:
    return _arena_messages() >= messages


def _arena_messages() -> float:
    return _of_arena("connector_messages_total")


def _of_arena(name: str) -> float:
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == f"vllm:omni_sched_{name}" and sample.labels["path"] == "arena"
    )


STAGE_SCENARIOS: dict[str, Callable[[Any, PipelineSpec, str], Awaitable[Result]]] = {
    "undisturbed": undisturbed,
    "merged": merged,
    "parting": parting,
    "handed_over": handed_over,
    "crowded": crowded,
    "limited": partial(crowded, asks=LIMITED),
    "killed_0": partial(killed, stage_id=0),
    "killed_1": partial(killed, stage_id=1),
    "told": told,
}
EDGE_SCENARIOS = {"connected": connected, "sized": sized}  # only where the arena is the connector


def equal(asks: Mapping[str, Ask], times: int) -> dict[str, Ask]:
    """Return each request several times, as ``name/number``; half of the clients get each token once."""
    return {
        f"{name}/{number}": ask._replace(delta=number % 2 == 1) for name, ask in asks.items() for number in range(times)
    }


async def ask_all(omni: Any, spec: PipelineSpec, prefix: str, asks: Mapping[str, Ask]) -> dict[str, Any]:
    """At a time; a request that fails answers with its error."""
    answers = [_heard(omni, spec, f"{prefix}-{number}", ask) for number, ask in enumerate(asks.values())]
    return dict(zip(asks, await asyncio.gather(*answers), strict=True))


async def _heard(omni: Any, spec: PipelineSpec, request_id: str, ask: Ask) -> dict[str, Any]:
    answer: dict[str, Any] = {"text": {}}
    ends: Counter[str] = Counter()
    try:
        async for output in _outputs(omni, spec, request_id, ask):
            if output.error:
                raise RuntimeError(output.error)
            ends[str(output.stage_id)] += bool(output.finished)
            stage = str(output.stage_id)
            before = answer["text"].get(stage, [])
            take(output, answer, ask.delta)
            now = answer["text"].get(stage, [])
            if now[: len(before)] != before:
                raise RuntimeError(f"stage {stage} said {before}, and then {now}")
    except Exception as error:  # noqa: BLE001  the test that compares answers shows it
        answer["text"]["error"] = str(error)
    return answer | {"ends": dict(ends)}


async def _leave(omni: Any, spec: PipelineSpec, request_id: str, ask: Ask, when: asyncio.Event) -> None:
    async with aclosing(_outputs(omni, spec, request_id, ask)) as outputs:
        async for output in outputs:
            if output.stage_id == 0 and len(output.outputs[0].token_ids) >= LEAVE_AFTER_TOKENS and when.is_set():
                return
    raise RuntimeError("the request that was to be left was answered in full")


def _outputs(omni: Any, spec: PipelineSpec, request_id: str, ask: Ask) -> AsyncIterator[Any]:
    outputs: AsyncIterator[Any] = omni.generate(
        ask.prompt, request_id=request_id, sampling_params_list=sampling_params(spec, ask)
    )
    return outputs


@contextmanager
def counted(omni: Any) -> Iterator[dict[str, int]]:
    """Count the requests that the engines of each stage are given meanwhile."""
    submitted = {str(pool.stage_id): 0 for pool in omni.engine.stage_pools}

    def counting(stage: str, theirs: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def add_request_async(*arguments: Any, **more: Any) -> None:
            submitted[stage] += 1
            await theirs(*arguments, **more)

        return add_request_async

    clients = [(str(pool.stage_id), client) for pool in omni.engine.stage_pools for client in pool.clients if client]
    for stage, client in clients:
        client.add_request_async = counting(stage, client.add_request_async)
    try:
        yield submitted
    finally:
        for _, client in clients:
            del client.add_request_async  # the method of its class is back


@contextmanager
def stepped(omni: Any) -> Iterator[tuple[dict[str, list[int]], dict[str, int]]]:
    """Note for each stage how many requests each step made a token for, and the most that had none yet at a time."""
    steps: dict[str, list[int]] = {str(pool.stage_id): [] for pool in omni.engine.stage_pools}
    most = dict.fromkeys(steps, 0)
    without: dict[str, set[str]] = {stage: set() for stage in steps}

    def watch(stage: str, client: Any) -> None:
        add, get = client.add_request_async, client.get_output_async

        async def add_request_async(request: Any, *arguments: Any, **more: Any) -> None:
            without[stage].add(request.request_id)
            most[stage] = max(most[stage], len(without[stage]))
            await add(request, *arguments, **more)

        async def get_output_async() -> Any:
            found = await get()
            made = {one.request_id for one in found.outputs if one.new_token_ids}
            without[stage] -= made
            if made:
                steps[stage].append(len(made))
            return found

        client.add_request_async, client.get_output_async = add_request_async, get_output_async

    clients = [(str(pool.stage_id), client) for pool in omni.engine.stage_pools for client in pool.clients if client]
    for stage, client in clients:
        watch(stage, client)
    try:
        yield steps, most
    finally:
        for _, client in clients:
            del client.add_request_async, client.get_output_async


@contextmanager
def payloads_taken_back(omni: Any) -> Iterator[tuple[dict[int, list[str]], dict[int, set[str]]]]:
    """Whose payloads are looked for after a death meanwhile, and whose nobody had got, by the stage they are for."""
    payloads = omni.engine.stage_pools[0].queue._hooks.payloads
    theirs = payloads.take_back
    looked_for: defaultdict[int, list[str]] = defaultdict(list)
    found: defaultdict[int, set[str]] = defaultdict(set)

    def take_back(pool: Any, names: Sequence[str], *rest: Any) -> set[str]:
        looked_for[pool.stage_id].extend(names)
        held: set[str] = theirs(pool, names, *rest)
        found[pool.stage_id] |= held
        return held

    payloads.take_back = take_back
    try:
        yield looked_for, found
    finally:
        del payloads.take_back


def in_the_middle(pool: Any) -> bool:
    """Return whether the first replica has several requests, and in the first stage one of them has output."""
    works = [work for work in list(pool.queue.running.values()) if work.replica_id == 0]
    return len(works) > 1 and (pool.stage_id > 0 or any(work.has_output for work in works))


def held(pool: Any) -> int:
    queue = pool.queue
    return len(queue.running) + len(queue.waiting) + len(queue.stage.held)


def samples() -> Iterator[tuple[str, dict[str, str], float]]:
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith(METRICS):
                yield sample.name.removeprefix(METRICS), dict(sample.labels), sample.value


def _finished(spec: PipelineSpec) -> float:
    """Requests that were through with the last stage, by the metrics."""
    return sum(
        value
        for name, labels, value in samples()
        if name == "requests_total" and (labels["stage"], labels["outcome"]) == (str(spec.stages - 1), "finished")
    )


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(UNTIL_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)
