"""Find what is left of requests in an orchestrator."""

from __future__ import annotations

from typing import Any


def left_over(omni: Any, driver: Any) -> dict[str, Any]:
    """Return all that an orchestrator keeps of requests; empty when all have left."""
    kept = {
        "request_states": omni.request_states,
        "deduplicator": {**omni.deduplicator._emitted, **dict.fromkeys(omni.deduplicator._ended)},
        "keys": omni.sharing._keys,
        "unread": omni.sharing._unread,
        "shares": omni.sharing._shares,
        "sendings": omni.sharing._sendings,
        "known": driver.context.known,
        "waived": driver.context.waived,
        "departed": driver.core._departed,
        "parked": [one for each in omni.recovery.parking.parked.values() for one in each],
        "handovers": omni.recovery.handovers._open,
        "watched": omni.stall_guard._stalled._last,
    }
    if driver.graph.branches:
        kept |= {"lying": omni.sharing._lying, "starts": omni._starts, "kept": omni._kept, "came from": omni._came_from}
        kept["on their way"] = omni.recovery._on_their_way
        kept |= {"owners": omni.sharing._owners, "waits": omni.sharing._waits}
        kept |= {"sent to": omni._sent_to, "first requests": omni._first_requests}
        if omni.recovery._chunks is not None:
            kept["left early"] = omni.recovery._chunks._left_early
        names = [pool.names for pool in omni.stage_pools]
        kept["branch names"] = [
            one for each in names for one in (*each._runs, *each._present, *each._given, *each._stale)
        ]
    if omni.recovery.names is not None:
        names = omni.recovery.names
        kept["names"] = [*names._runs, *names._present, *names._given, *names._stale]
    recovery = driver.core.recovery
    if recovery is not None:
        kept |= {"works": recovery.works, "lost": recovery.lost, "given up": recovery._given_up}
        kept["ledger"] = recovery.policy._ledger.entries
    credits = driver.context.credits
    if credits is not None:
        capacity = driver.config.runtime.credits.capacity
        kept["credits"] = [one for one in credits.order if credits.free(one) != capacity]
    for pool in omni.stage_pools:
        stage = pool.queue.stage
        loads = {i: len(replica.load) for i, replica in stage.replicas.items() if len(replica.load)}
        for name, of in {
            "waiting": stage.waiting,
            "running": stage.running,
            "followers": stage._following,
            "leaders": stage._leader,
            "held": stage.held,
            "queued": stage._queue._works,
            "gated": stage.gate._entries,
            "merger": stage.merger._groups,
            "loads": loads,
            "bindings": pool._request_bindings,
            "processor": pool.output_processor.request_states if pool.output_processor is not None else (),
        }.items():
            kept[f"{name} of stage {pool.stage_id}"] = of
    return {name: dict(of) if isinstance(of, dict) else list(of) for name, of in kept.items() if of}


def _names_in(names: Any) -> list[str]:
    return [*names._runs, *names._present, *names._given, *names._stale]
