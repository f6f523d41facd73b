"""Run a real engine that lends KV blocks to its lane, in rounds: `… MODEL ours|stock ENGINE`, JSON on stdout.

ENGINE is one of `ENGINES`. For `stock` the same requests are served by vLLM alone, in the rounds without a fault.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from contextlib import nullcontext
from typing import Any

from tests.engine.combinations.speculation_on_cpu import speculate_on_cpu
from tests.engine.harness.async_on_cpu import async_scheduling_on_cpu
from tests.engine.harness.inproc import InProcessEngine
from tests.engine.harness.lane_faults import FAULTS, PLAIN, inject
from tests.engine.harness.media import picture
from tests.engine.harness.spec import OURS, EngineSpec

BLOCKS = 40
EMBEDS, RESERVE = 64, 16  # of each picture; set aside
BYTES_PER_EMBED = 45_000  # some 38,000 are measured
OPTIONS = {
    "encode_ahead": True,
    "itl_target_ms": 0.01,  # nothing goes unnoticed under such a target: all of it goes to the lane
    "kv_lending": 0.6,
    "expert": {"encoder_reserve_embeds": RESERVE, "encode_bytes_per_embed": BYTES_PER_EMBED},
}
TEXTS = 10
ARGS = {
    "max_model_len": 512,
    "block_size": 128,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": BLOCKS,
    "enable_prefix_caching": True,
}
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
ENGINES: dict[str, dict[str, Any]] = {"plain": {}, "speculation": NGRAM, "async scheduling": {}}
PREFIXES = ["prefixes", "prefixes again"]  # the second finds what the first has left in the prefix cache
ROUNDS = ["none", *PREFIXES, "reset", "paused", "raises", "no memory", "aborted", "dies", "dies without a successor"]
OF_STOCK = ["none", *PREFIXES]


def main(model: str, side: str = "ours", engine: str = "plain") -> None:
    stock = side == "stock"
    fault = None if stock else inject()
    speculate_on_cpu()
    spec = EngineSpec(
        "lending",
        model,
        (),
        args={**ARGS, **ENGINES[engine]},
        scheduler=None if stock else OURS,
        omni_sched=None if stock else OPTIONS,
    )
    with async_scheduling_on_cpu() if "async" in engine else nullcontext():
        here = InProcessEngine(spec)
        found: dict[str, Any] = {}
        for name in OF_STOCK if stock else ROUNDS if engine == "plain" else ["none"]:
            if fault is not None:
                fault[0] = list(FAULTS).index(name) if name in FAULTS else 0
            here.engine.reset_encoder_cache()
            if name != PREFIXES[1]:
                here.engine.reset_prefix_cache()
            found[name] = round_of(here, name)
    print(json.dumps(found))


def text(one: int, name: str) -> list[int]:
    """Return the prompt of a text request; with prefixes, two blocks that all have and some tokens of its own."""
    if name in PREFIXES:
        return [*range(5, 5 + 2 * ARGS["block_size"]), *range(300 + one, 305 + one)]
    return [*range(5 + one, 25 + one)] * 5  # a drafter finds repetitions in it


def round_of(here: InProcessEngine, name: str) -> dict[str, Any]:
    """Run text requests that fill most of the KV cache beside three pictures, and return what came of them."""
    scheduler = here.core.scheduler
    pool, lending = scheduler.kv_cache_manager.block_pool, Lending(here)
    preempted: list[str] = []
    preempt, schedule = scheduler._preempt_request, scheduler.schedule
    drafted = paused = 0
    running: list[str] = []

    def count(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal drafted
        output = schedule(*args, **kwargs)
        drafted += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        return output

    scheduler._preempt_request, scheduler.schedule = count, step
    free = pool.get_num_free_blocks()
    for one in range(TEXTS):
        here._add(f"text-{one}", {"prompt_token_ids": text(one, name)}, 100 if name in PREFIXES else 200)
    tokens: dict[str, list[int]] = {f"text-{one}": [] for one in range(TEXTS)}
    reasons: dict[str, str] = {}
    hits: dict[str, int] = {}

    def take(outputs: Any) -> None:
        for output in outputs:
            tokens[output.request_id] += output.outputs[0].token_ids
            hits[output.request_id] = output.num_cached_tokens or 0
            if output.outputs[0].finish_reason:
                reasons[output.request_id] = output.outputs[0].finish_reason

    for _ in range(3):
        take(here.engine.step())
    pictures = {"good-1": picture(1), "plain": PLAIN, "good-2": picture(3)}
    for id_, data in pictures.items():
        here._add(id_, {"prompt": "<image>what is it", "multi_modal_data": {"image": data}}, 6)
    tokens |= {id_: [] for id_ in pictures}
    for _ in range(20_000):
        take(here.engine.step())
        lending.look()
        if lending.in_use and name == "aborted":
            here.engine.abort_request([id_ for id_ in pictures if id_ not in reasons])
            reasons |= {id_: "abort" for id_ in pictures if id_ not in reasons}
        if lending.in_use and name in ("reset", "paused") and not paused:
            paused = lending.lent
            if name == "reset":
                running = [request.request_id for request in scheduler.running]
                assert here.core.reset_prefix_cache(reset_running_requests=True)
            else:
                here.core.pause_scheduler(mode="keep", clear_cache=False)
                for _ in range(3):
                    assert here.engine.step() == []
                here.core.resume_scheduler()
            assert lending.lent == paused
        if len(reasons) == len(tokens):
            break
    for _ in range(4):  # what was in flight when the last request left
        here.engine.step()
    scheduler._preempt_request, scheduler.schedule = preempt, schedule
    return {
        "tokens": tokens,
        "reasons": reasons,
        "preempted": preempted,
        "running": running,
        "drafted": drafted,
        "paused": paused,
        "hits": sum(hits.values()),
        "not_back": free - pool.get_num_free_blocks(),
        "left": sorted(scheduler.requests),
        **lending.report(),
    }


class Lending:
    """Records what is lent in a round, as seen from outside."""

    def __init__(self, here: InProcessEngine) -> None:
        omni = getattr(here.core.scheduler, "omni", None)
        self._steered = None if omni is None else omni.policies
        self._scheduler = here.core.scheduler
        self._runner = here.core.model_executor.driver_worker.worker.model_runner
        self._before = dict(self._counts())
        self.most = 0
        self.resident: list[int] = []

    def _counts(self) -> dict[str, int]:
        if self._steered is None:
            return {}
        planner, metrics = self._steered.planner, self._steered.metrics
        planner.count_into(metrics)
        return {
            "taken": self._steered.lent.taken,
            "given_back_bytes": metrics.kv_given_back_bytes,
            **{f"loans_{reason}": number for reason, number in metrics.kv_loans.items()},
        }

    @property
    def lent(self) -> int:
        return 0 if self._steered is None else len(self._steered.lent)

    @property
    def in_use(self) -> bool:
        return self._steered is not None and self._steered.core.ahead.ledger.active_embeds() > RESERVE

    def look(self) -> None:
        if self._steered is None:
            return
        lent = self._steered.lent
        self.most = max(self.most, len(lent))
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        held = {one.block_id for each in managers for blocks in each.req_to_blocks.values() for one in blocks}
        assert not held & set(lent.block_ids), "a lent block belongs to a request"
        if len(lent) and not lent.has_news:
            self.resident.append(resident_pages(self._runner, lent.block_ids))

    def report(self) -> dict[str, Any]:
        now = self._counts()
        return {
            "most": self.most,
            "resident": self.resident,
            "bytes_per_embed": 0.0 if self._steered is None else self._steered.metrics.bytes_per_embed,
            **{name: number - self._before[name] for name, number in now.items()},
        }


def resident_pages(runner: Any, block_ids: list[int]) -> int:
    """Return how many whole pages of these blocks are in memory."""
    from vllm_omni_sched.engine.lending.pages import kv_pages_of

    mincore, found = ctypes.CDLL(None, use_errno=True).mincore, 0
    pages = kv_pages_of(runner)
    for block_id in block_ids:  # each alone: blocks may have been lent one after the other
        for address, length in pages.ranges([block_id]):
            seen = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
            assert mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), seen) == 0
            found += sum(one & 1 for one in seen)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
