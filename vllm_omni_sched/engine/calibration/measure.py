"""Runs the whole calibration of one engine."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.engine.calibration.client import Client, running
from vllm_omni_sched.engine.calibration.loads import Loads
from vllm_omni_sched.engine.calibration.prompts import Prompts
from vllm_omni_sched.engine.calibration.served import ApiServer, HttpClient, ServedLoads, image_url, serving
from vllm_omni_sched.sim.costs.fit import Observations, ServerStart
from vllm_omni_sched.sim.under_load import Served

_DECODES = (1, 2, 4, 8, 16, 32)
_CONTEXTS = ((1, 1024), (4, 512), (4, 1024))
_PREFILLS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 3072)
_BESIDE = (16, 64, 256, 512)
_WORDS = (4, 64, 512)
_IMAGES = (1, 2, 3)
_TOKENS = 96  # of each decode load

Progress = Callable[[str, int, int], None]
"""Reports progress: name of the current load, number of loads done, number of all loads."""


@dataclass(frozen=True)
class Plan:
    """The loads that a calibration runs.

    Attributes:
        rounds: how often each load is repeated.
        longest: length of the longest prompt, in tokens.
        most_requests: most requests that decode at a time.
        image_size: width and height of the images, in pixels; None to take the model's.
        lane: whether to measure the lane of encode-ahead, too.
        server: whether to measure `vllm serve` over HTTP, too.
        starts: how often the server is started anew for that; all rounds run on each start.
        seed: of the random prompts.
    """

    rounds: int = 3
    longest: int = 3072
    most_requests: int = 32
    image_size: tuple[int, int] | None = None
    lane: bool = True
    server: bool = False
    starts: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """Results of a calibration: observations, KV cache size in tokens, facts about the engine for the file's source,
    and the two servers for a simulation.
    """

    observed: Observations
    kv_tokens: int
    facts: dict[str, Any]
    server: Served
    server_with_lane: Served


def measure(arguments: dict[str, Any], plan: Plan, progress: Progress) -> Measured:
    """Start the engine, run all loads on it, and shut it down.

    Then, if they are asked for, an engine with encode-ahead, to measure the lane, and servers of the first one and of
    the second in turns.

    Raises:
        ConfigError: the engine arguments cannot be used, or images for the model cannot be made.
    """
    observed = Observations()
    progress("starting the engine", 0, 1)
    with running(arguments, monotonic_seconds) as client:
        prompts = Prompts(client.config, plan.image_size, plan.seed)
        asyncio.run(_all_loads(Loads(client, prompts, observed), _loads(client, prompts, plan), plan, progress))
        kv_tokens = _kv_tokens(client.config)
        max_num_seqs = client.config.scheduler_config.max_num_seqs
        facts = {"max_num_batched_tokens": client.config.scheduler_config.max_num_batched_tokens}
        stage = _stage(client.config)
        if prompts.max_images:
            facts["image_size"] = prompts.image_size
    if plan.lane and prompts.max_images:
        progress("starting the engine with encode-ahead", 0, 1)
        with running(_with_lane(arguments), monotonic_seconds) as client:
            prompts = Prompts(client.config, plan.image_size, plan.seed + 1)
            asyncio.run(_all_loads(Loads(client, prompts, observed), _lane_loads(prompts), plan, progress))
    if plan.server:
        most = min(plan.most_requests, max_num_seqs)
        size = prompts.image_size if prompts.max_images else None
        beside = plan.lane and prompts.max_images > 0
        for number in range(plan.starts):  # both kinds in turns: the machine changes meanwhile
            about = f" ({number + 1} of {plan.starts})" if plan.starts > 1 else ""
            progress(f"starting the server{about}", 0, 1)
            observed.starts.append(_start(arguments, size, most, plan, number, progress))
            if beside:
                progress(f"starting the server with encode-ahead{about}", 0, 1)
                observed.lane_starts.append(_start(_with_lane(arguments), size, most, plan, number, progress))
    of = [Served(stage, _policy(one)) for one in (arguments, _with_lane(arguments))]
    return Measured(observed, kv_tokens, facts, *of)


def _start(
    arguments: dict[str, Any],
    image_size: tuple[int, int] | None,
    most_requests: int,
    plan: Plan,
    number: int,
    progress: Progress,
) -> ServerStart:
    """Start a server, run its loads, and end it. ``number``: of the start; each has prompts of its own."""
    start = ServerStart()
    with serving(arguments["model"], _without_model(arguments), monotonic_seconds) as server:
        random = np.random.default_rng((plan.seed + 2, number))
        asyncio.run(_served(server, image_size, most_requests, start, random, plan.rounds, progress))
    return start


Load = tuple[str, Callable[[Loads], Awaitable[Any]]]


async def _all_loads(loads: Loads, chosen: list[Load], plan: Plan, progress: Progress) -> None:
    warm = Observations()
    seen, loads.observed = loads.observed, warm
    for name, load in chosen:
        if name in ("prefill of 64", "1 images", "lane, 1 images"):
            for _ in range(3):
                progress("warming up", 0, 1)
                await load(loads)
    loads.observed = seen
    turns = [(name, load) for _ in range(plan.rounds) for name, load in chosen]
    for done, (name, load) in enumerate(turns):
        progress(name, done, len(turns))
        await load(loads)
    progress("done", len(turns), len(turns))


async def _served(
    server: ApiServer,
    image_size: tuple[int, int] | None,
    most_requests: int,
    observed: ServerStart,
    random: np.random.Generator,
    rounds: int,
    progress: Progress,
) -> None:
    """Run all loads on a server, the first time to warm it up."""
    import aiohttp

    image = partial(image_url, random, image_size) if image_size is not None else None
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector) as session:
        await server.wait(session)
        client = HttpClient(session, server.url, monotonic_seconds)
        loads = ServedLoads(client, server.cpu_seconds, image, random, observed)
        chosen = loads.all(most_requests)
        turns = [(name, load) for _ in range(rounds) for name, load in chosen]
        loads.observed = ServerStart()
        for _, load in chosen:
            progress("warming up the server", 0, 1)
            await load()
        loads.observed = observed
        for done, (name, load) in enumerate(turns):
            progress(name, done, len(turns))
            await load()
        progress("done", len(turns), len(turns))


def _stage(config: Any) -> dict[str, Any]:
    """Return the options of an engine stage that simulates this engine; on a CPU, with the lane of a small machine."""
    lane: dict[str, Any] = {}
    if config.device_config.device_type == "cpu":
        cores = os.cpu_count() or 1
        lane = {"lane_items": 2, "lane_on": "beside"} if cores > 1 else {"lane_on": "shared"}
    return {
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_model_len": config.model_config.max_model_len,
        **lane,
    }


def _policy(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of our scheduler in engine arguments; none without it."""
    return dict((arguments.get("additional_config") or {}).get("omni_sched", {}))


def _without_model(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "model"}


def _loads(client: Client, prompts: Prompts, plan: Plan) -> list[Load]:
    longest = min(plan.longest, client.config.model_config.max_model_len - _TOKENS - 1)
    most = min(plan.most_requests, client.config.scheduler_config.max_num_seqs)
    found: list[Load] = []
    for n in (n for n in _DECODES if n <= most):
        found.append((f"{n} decoding", partial(Loads.decodes, requests=n, context=16, tokens=_TOKENS)))
    for n, context in ((n, c) for n, c in _CONTEXTS if n <= most and c <= longest):
        found.append(
            (f"{n} decoding behind {context}", partial(Loads.decodes, requests=n, context=context, tokens=_TOKENS))
        )
    for length in (n for n in _PREFILLS if n <= longest):
        found.append((f"prefill of {length}", partial(_prefill, prompts=prompts, length=length, longest=longest)))
    beside = [n for n in _BESIDE if n <= longest]
    found.append(("prefills beside decoding", lambda loads: loads.beside([prompts.about(n) for n in beside])))
    words = [n for n in _WORDS if n <= longest]
    for count in words:
        found.append((f"{count} words", partial(Loads.front, words=count)))
    for number in (n for n in _IMAGES if n <= prompts.max_images):
        found.append((f"{number} images", partial(Loads.images, number=number)))
    found.append(("front end beside decoding", lambda loads: loads.front_beside(min(prompts.max_images, 1), words)))
    return found


async def _prefill(loads: Loads, *, prompts: Prompts, length: int, longest: int) -> None:
    """Measure the prefill of a prompt of about this length, which is drawn anew each time."""
    await loads.prefill(min(prompts.about(length), longest))


def _lane_loads(prompts: Prompts) -> list[Load]:
    numbers = [n for n in _IMAGES if n <= prompts.max_images]
    return [(f"lane, {n} images", partial(Loads.lane, number=n)) for n in numbers]


def _with_lane(arguments: dict[str, Any]) -> dict[str, Any]:
    """Add encode-ahead to engine arguments, without rests between decode steps: a simulator adds those itself."""
    additional = dict(arguments.get("additional_config") or {})
    additional["omni_sched"] = {**additional.get("omni_sched", {}), "encode_ahead": True, "decode_pace": 0.0}
    return {**arguments, "scheduler_cls": "vllm_omni_sched.OmniScheduler", "additional_config": additional}


def _kv_tokens(config: Any) -> int:
    cache = config.cache_config
    return int((cache.num_gpu_blocks or 0) * cache.block_size)
