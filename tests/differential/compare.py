"""What has to be the same after every step, and what has to hold at the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.differential.side import Side
from tests.support.difference import Difference, first_difference
from tests.support.worker import Complaint, needs_data

CLOCK_FIELDS = ("timestamp", "ts")


def compare_messages(stock: Any, ours: Any) -> Difference | None:
    """Two scheduler outputs, field by field; new requests as the runner gets them, so with session messages
    expanded."""
    found = first_difference(stock, ours, "output", ignore=("scheduled_new_reqs", "encoder_input_updates"))
    if found:
        return found
    theirs = [new.req_id for new in stock.scheduled_new_reqs]
    if found := first_difference(theirs, [new.req_id for new in ours.scheduled_new_reqs], "new requests"):
        return found
    for one, other in zip(stock.scheduled_new_reqs, ours.scheduled_new_reqs, strict=True):
        # Tokens for runner V2 only: V1 ignores what ours puts there. Items are compared where the worker keeps them.
        ignore = ("mm_features",) if one.prefill_token_ids is not None else ("mm_features", "prefill_token_ids")
        if found := first_difference(one, other, f"new request {one.req_id}", ignore):
            return found
    return None


def compare_workers(stock: Side, ours: Side) -> Difference | None:
    """Both workers hold the same requests, with data wherever stock has it and it can still be asked for."""
    updates = stock.worker.encoder_input_updates, ours.worker.encoder_input_updates
    if found := first_difference(*updates, "encoder_input_updates"):
        return found
    left, right = stock.worker.requests, ours.worker.requests
    for request_id, request in left.items():
        if request_id not in right:
            return Difference(f"worker: request {request_id}", request, None)
        other = right[request_id]
        for name in ("prompt_token_ids", "block_ids", "num_computed_tokens", "sampling_params"):
            path = f"worker: {name} of {request_id}"
            if found := first_difference(getattr(request, name), getattr(other, name), path):
                return found
        # A worker in the scheduler's own process may share its list, which grows before the message about it is sent.
        if len(request.features) > len(other.features) or (
            len(request.features) < len(other.features) and stock.settings.worker_is_separate_process
        ):
            return Difference(f"worker: items of {request_id}", request.features, other.features)
        needed = needs_data(request)
        for index, (one, two) in enumerate(zip(request.features, other.features, strict=False)):
            path = f"worker: item {index} of {request_id}"
            if found := first_difference(one, two, path, ignore=("data",)):
                return found
            if one.data is None:
                continue
            if needed(one) or "address" in one.data:
                # More than stock is fine: after a preemption, stock's runner V1 lacks data that it had been sent
                # stripped.
                for name, values in one.data.items():
                    there = None if two.data is None else two.data.get(name)
                    if found := first_difference(values, there, f"{path}: data[{name!r}]"):
                        return found
            elif stock.settings.uses_mrope and (two.data is None or "grid" not in two.data):
                return Difference(f"{path}: what M-RoPE positions are computed from", one.data, two.data)
    if left.keys() != right.keys():
        return Difference("worker: requests", set(left), set(right))
    if stock.worker.encoder_outputs != ours.worker.encoder_outputs:
        return Difference("worker: encoder outputs", stock.worker.encoder_outputs, ours.worker.encoder_outputs)
    for complaint in ours.worker.complaints:
        if not is_stocks_own(stock, complaint) and (complaint not in stock.worker.complaints or _gives_data_back(ours)):
            return Difference(f"worker: {complaint}", stock.worker.complaints, ours.worker.complaints)
    return None


def is_stocks_own(stock: Side, complaint: Complaint) -> bool:
    """Nobody has the data of an item that arrived without. Else a worker must never lack anything, though stock's
    runner V1 does when a preempted session has lost the data of its first items."""
    if complaint.what != "no data to encode":
        return False
    return stock.scheduler.requests[complaint.request_id].mm_features[complaint.input_id].data is None


def _gives_data_back(ours: Side) -> bool:
    """With both of these off, or under stock's own scheduler, nothing repairs what stock does there."""
    features = getattr(ours.scheduler, "omni_features", {})
    return any(name in features and features[name].active for name in ("strip_frontier", "session_delta"))


def compare_engine_outputs(stock: Any, ours: Any) -> Difference | None:
    return first_difference(stock, ours, "engine outputs", ignore=CLOCK_FIELDS)


def compare_states(stock: Side, ours: Side) -> Difference | None:
    """KV events, encoder cache, queues and requests."""
    if found := first_difference(stock.kv_events.take(), ours.kv_events.take(), "KV events", ignore=CLOCK_FIELDS):
        return found
    indexed = hasattr(stock.scheduler.encoder_cache_manager, "request_cached_ids")  # else it names items of others too
    if found := first_difference(_state(stock.scheduler, indexed), _state(ours.scheduler, indexed), "state"):
        return found
    if validate := getattr(ours.scheduler.encoder_cache_manager, "validate", None):
        validate()
    return None


def _state(scheduler: Any, indexed: bool) -> dict[str, Any]:
    manager = scheduler.encoder_cache_manager
    return {
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "free blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "encoder cache: free slots": manager.num_free_slots,
        "encoder cache: freeable slots": manager.num_freeable_slots,
        "encoder cache: entries": {mm_hash: set(users) for mm_hash, users in manager.cached.items()},
        "encoder cache: eviction order": list(manager.freeable.items()),
        "requests": {
            request.request_id: _request(request, manager if indexed else None)
            for request in scheduler.requests.values()
        },
    }


def _request(request: Any, manager: Any) -> dict[str, Any]:
    return {
        "status": request.status,
        "tokens": request._all_token_ids,
        "prompt": request.prompt_token_ids,
        "computed": request.num_computed_tokens,
        "placeholders": request.num_output_placeholders,
        "preemptions": request.num_preemptions,
        "block hashes": request.block_hashes,
        "items": [(f.identifier, f.mm_position.offset, f.mm_position.length) for f in request.mm_features],
        "cached items": set(manager.get_cached_input_ids(request)) if manager else None,
    }


def check_nothing_left(side: Side) -> Difference | None:
    """Every request that was added has left once, and no block, slot, item or session is held any more."""
    scheduler = side.scheduler
    manager = scheduler.encoder_cache_manager
    if scheduler.requests or scheduler.running or len(scheduler.waiting):
        return Difference("left behind: requests", {}, scheduler.requests)
    left = Counter(side.finished_req_ids)
    if left != Counter(side.added):
        return Difference("times that each request has left", Counter(side.added), left)
    pool = scheduler.kv_cache_manager.block_pool
    if pool.get_num_free_blocks() != side.settings.num_blocks - 1:  # one is the null block
        return Difference("left behind: free blocks", side.settings.num_blocks - 1, pool.get_num_free_blocks())
    if any(manager.cached.values()) or getattr(manager, "request_cached_ids", None):
        return Difference("left behind: references into the encoder cache", {}, manager.cached)
    if manager.num_freeable_slots != manager.cache_size:
        return Difference("left behind: encoder cache slots", manager.cache_size, manager.num_freeable_slots)
    return None
