"""What a scheduler decides on random workloads, as text: run on the pristine and on the patched tree, and compared.

    PYTHONPATH=<tree> python -m patches.decisions 40

Each line is one seed: a digest of everything the scheduler decided in each step, and the first steps at which a
stand-in for the worker lacked what it was told to use. The workloads mix one-shot requests and streaming sessions,
repeated items, aborts, scarce KV blocks, small encoder budgets and caches, prefix caching, both model runners, sync and
async scheduling.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from patches.series import ROOT

NUM_STEPS = 80


def run_decisions(tree: Path, python: str, extras: Path, seeds: int) -> dict[str, dict[str, Any]]:
    """Run this module on a tree; the result by seed."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tree), str(extras), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    result = subprocess.run(
        [python, "-W", "ignore", "-m", "patches.decisions", str(seeds)],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"decisions on {tree.name}: {result.stderr[-2000:]}")
    return {line["seed"]: line for line in map(json.loads, result.stdout.splitlines())}


def main(num_seeds: int) -> None:
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms.current_platform = CpuPlatform()
    for seed in range(num_seeds):
        print(json.dumps(Workload(seed).run(), sort_keys=True), flush=True)


class Worker:
    """What a model runner holds of the requests: the features it was sent, and the hashes it has encoded."""

    def __init__(self, is_v2: bool) -> None:
        self.is_v2 = is_v2
        self.features: dict[str, list[Any]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.encoded: set[str] = set()
        self.missing: list[str] = []
        self.receiver: Any = None
        if importlib.util.find_spec("vllm.v1.worker.session_receiver"):
            from vllm.v1.worker.session_receiver import SessionReceiver

            self.receiver = SessionReceiver()

    def step(self, number: int, output: Any) -> None:
        # The worker is another process.
        output = pickle.loads(pickle.dumps(output))
        if self.receiver is not None:
            self.receiver.receive(output)
        for mm_hash in output.free_encoder_mm_hashes:
            self.encoded.discard(mm_hash)
        gone = set(output.finished_req_ids) | (set(output.preempted_req_ids or ()) if self.is_v2 else set())
        for req_id in gone:
            self.features.pop(req_id, None)
            self.tokens.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            # Copies: a model runner keeps what it was sent, whatever the receiver does to its lists afterwards.
            self.features[new.req_id] = list(new.mm_features)
            self.tokens[new.req_id] = list(new.prefill_token_ids if self.is_v2 else new.prompt_token_ids)
        for req_id, updates in getattr(output, "encoder_input_updates", {}).items():
            for input_id, data in updates.items():
                old = self.features[req_id][input_id]
                self.features[req_id][input_id] = type(old)(
                    data=data, modality=old.modality, identifier=old.identifier, mm_position=old.mm_position
                )
        for req_id, input_ids in output.scheduled_encoder_inputs.items():
            for input_id in input_ids:
                feature = self.features[req_id][input_id]
                if feature.data is None and feature.identifier not in self.encoded:
                    self.missing.append(f"step {number}: {req_id} lacks the data of item {input_id}")
                self.encoded.add(feature.identifier)


class Workload:
    def __init__(self, seed: int) -> None:
        from vllm_omni_sched.testing import make_scheduler

        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.is_v2 = importlib.util.find_spec("vllm.v1.worker.gpu") is not None and rng.random() < 0.5
        self.is_async = rng.random() < 0.5
        self.scheduler = make_scheduler(
            async_scheduling=self.is_async,
            use_v2_model_runner=self.is_v2,
            max_num_batched_tokens=rng.choice([16, 64, 256]),
            max_num_seqs=rng.choice([2, 4, 8]),
            num_blocks=rng.choice([24, 60, 400]),
            block_size=4,
            encoder_budget=rng.choice([8, 24, 64]),
            encoder_cache_size=rng.choice([8, 24, 64]),
            max_item_embeds=8,
            enable_prefix_caching=rng.random() < 0.5,
            disable_chunked_mm_input=rng.random() < 0.2,
            kv_events=rng.random() < 0.3,
            max_model_len=90,
        )
        # Which of two items that are freed in one step is evicted first depends on how a set of integers came about.
        # That is no decision: here it is their order in the prompt.
        manager = self.scheduler.encoder_cache_manager
        cached_input_ids = manager.get_cached_input_ids
        manager.get_cached_input_ids = lambda request: sorted(cached_input_ids(request))
        self.worker = Worker(self.is_v2)
        if self.worker.receiver is not None:
            self.scheduler.send_session_deltas = True
        self.sessions: list[str] = []
        self.num_items = 0

    def run(self) -> dict[str, Any]:
        from vllm_omni_sched.testing import run_step

        digest = hashlib.sha256()
        steps = []
        for number in range(NUM_STEPS):
            self.arrivals(number)
            step = run_step(self.scheduler)
            self.worker.step(number, step.scheduled)
            text = json.dumps(self.decided(step), sort_keys=True, default=str)
            digest.update(text.encode())
            steps.append(hashlib.sha256(text.encode()).hexdigest()[:8])
            if lost := self.lost():
                break  # what follows would be decided without that request
        kind = ("v2" if self.is_v2 else "v1") + (" async" if self.is_async else " sync")
        return {
            "seed": self.seed,
            "kind": kind,
            "digest": digest.hexdigest()[:16],
            "steps": steps,
            "missing": self.worker.missing[:3],
            "lost": lost,
        }

    def lost(self) -> list[str]:
        """Requests that will never run, because they are in no queue."""
        names = ("running", "waiting", "skipped_waiting", "kv_holding_waiting")
        found = {request.request_id for name in names for request in getattr(self.scheduler, name, ())}
        return sorted(self.scheduler.requests.keys() - found)

    def items(self, num_tokens: int) -> list[Any]:
        from vllm_omni_sched.testing import make_item

        items = []
        offset = self.rng.randint(0, 2)
        while offset < num_tokens and self.rng.random() < 0.9:
            length = min(self.rng.randint(1, 8), num_tokens - offset)
            self.num_items += 1
            # An item that is repeated has the same length wherever it is. No request repeats one within itself: for
            # such an item stock 0.22 and the patched one hold the reference for different times.
            name = f"common-{length}" if not items and self.rng.random() < 0.2 else f"item-{self.num_items}"
            items.append(make_item(offset, length, name, data=self.num_items))
            offset += length + self.rng.randint(0, 3)
        return items

    def arrivals(self, number: int) -> None:
        from vllm_omni_sched.testing import make_request, make_session_update

        rng = self.rng
        if rng.random() < 0.25:
            num_tokens = rng.randint(1, 60)
            self.scheduler.add_request(
                make_request(
                    f"r{number}", num_tokens, self.items(num_tokens), max_tokens=rng.randint(1, 12), block_size=4
                )
            )
        if rng.random() < 0.1 and len(self.sessions) < 3:
            num_tokens = rng.randint(1, 8)
            self.sessions.append(f"s{number}")
            self.scheduler.add_request(
                make_request(
                    f"s{number}",
                    num_tokens,
                    self.session_items(num_tokens),
                    resumable=True,
                    max_tokens=rng.randint(1, 3),
                    block_size=4,
                )
            )
        for session in list(self.sessions):
            if session not in self.scheduler.requests:
                self.sessions.remove(session)
            elif rng.random() < 0.5:
                num_tokens = rng.randint(1, 5)
                self.scheduler.add_request(
                    make_session_update(
                        session, num_tokens, self.session_items(num_tokens), max_tokens=rng.randint(1, 3), block_size=4
                    )
                )
            elif rng.random() < 0.05:
                self.scheduler.add_request(make_session_update(session, last=True, block_size=4))
                self.sessions.remove(session)
        if self.scheduler.requests and rng.random() < 0.05:
            from vllm.v1.request import RequestStatus

            victim = rng.choice(sorted(self.scheduler.requests))
            self.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)

    def session_items(self, num_tokens: int) -> list[Any]:
        return [item for item in self.items(num_tokens) if not item.identifier.startswith("common")]

    def decided(self, step: Any) -> dict[str, Any]:
        scheduled = step.scheduled
        cached = scheduled.scheduled_cached_reqs
        manager = self.scheduler.encoder_cache_manager
        return {
            "tokens": scheduled.num_scheduled_tokens,
            "encode": scheduled.scheduled_encoder_inputs,
            "freed": scheduled.free_encoder_mm_hashes,
            "finished": sorted(scheduled.finished_req_ids),
            "preempted": sorted(scheduled.preempted_req_ids or ()),
            # What the worker holds of the requests after the message, however it was told.
            "new": [
                [
                    new.req_id,
                    new.num_computed_tokens,
                    self.worker.tokens[new.req_id],
                    [feature.identifier for feature in self.worker.features[new.req_id]],
                    [feature.mm_position.offset for feature in self.worker.features[new.req_id]],
                ]
                for new in scheduled.scheduled_new_reqs
            ],
            "blocks": {
                req_id: self.scheduler.kv_cache_manager.get_block_ids(req_id)
                for req_id in scheduled.num_scheduled_tokens
                if req_id in self.scheduler.requests
            },
            "cached": [
                cached.req_ids,
                cached.new_block_ids,
                cached.num_computed_tokens,
                sorted(cached.resumed_req_ids),
            ],
            "free slots": [manager.num_free_slots, manager.num_freeable_slots],
            "events": [repr(event) for event in self.scheduler.kv_cache_manager.take_events()],
            "outputs": [
                [output.request_id, output.new_token_ids, str(output.finish_reason)]
                for outputs in (step.outputs or {}).values()
                for output in outputs.outputs
            ],
        }


if __name__ == "__main__":
    main(int(sys.argv[1]))
