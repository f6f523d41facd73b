"""What is known about vLLM's own tests beforehand, by name and with the reason. An entry that no longer holds fails.

A name without parameters stands for all its parametrisations.
"""

from __future__ import annotations

from tests.upstream.suite import CORE, SCHEDULER_TESTS

NOT_APPLICABLE: dict[str, dict[str, str]] = {}
"""Guise -> tests that vLLM's classes pass and ours cannot, with the reason."""

_TOKEN_OUT_OF_STEP = "hands back tokens that no scheduled step is waiting for; an asynchronous scheduler counts those"
_SYNCHRONOUS = "is about synchronous scheduling, by its name"
_WAITS = "expects that a request is not scheduled before its tokens are back; asynchronous scheduling is there to do so"

_NEEDS_TRITON = "asks for pipeline parallelism of model runner V2, which needs Triton"
_EVERY_STEP = "counts steps and expects an empty one, where asynchronous scheduling has run ahead"

_FAILS_EVERYWHERE: dict[str, str] = {
    f"{SCHEDULER_TESTS}::test_async_scheduling_pp_allows_rescheduling_with_output_placeholders": _NEEDS_TRITON,
}
_STOCK_FAILS: dict[str, dict[str, str]] = {
    "async": {
        f"{SCHEDULER_TESTS}::test_update_from_output_routes_sampling_masks_by_request": _TOKEN_OUT_OF_STEP,
        f"{SCHEDULER_TESTS}::test_update_from_output_routes_multi_position_sampling_masks": _TOKEN_OUT_OF_STEP,
        f"{SCHEDULER_TESTS}::test_stop_via_update_from_output": _TOKEN_OUT_OF_STEP,
        f"{SCHEDULER_TESTS}::test_abort_request_when_structured_output_fsm_cannot_advance": _TOKEN_OUT_OF_STEP,
        f"{SCHEDULER_TESTS}::test_spec_decode_padding_skipped_for_diffusion": _TOKEN_OUT_OF_STEP,
        f"{SCHEDULER_TESTS}::test_ec_connector_allocate_encoder_tokens_with_external_load": _TOKEN_OUT_OF_STEP,
        f"{SCHEDULER_TESTS}::test_priority_scheduling_ec_connector_preemption_and_resumption": _TOKEN_OUT_OF_STEP,
        f"{SCHEDULER_TESTS}::test_empty_schedule_does_not_advance_the_prefill_cadence": _EVERY_STEP,
        f"{SCHEDULER_TESTS}::test_prefill_cadence_counts_executed_steps_not_schedule_calls": _EVERY_STEP,
        f"{SCHEDULER_TESTS}::test_schedule_concurrent_batches": _WAITS,
        f"{SCHEDULER_TESTS}::test_preempt_during_execution": _WAITS,
        f"{CORE}/test_deferred_block_free.py::test_non_async_abort_defers_via_last_sched_seq": _SYNCHRONOUS,
    },
}

_SINCE: dict[str, tuple[int, ...]] = {
    f"{SCHEDULER_TESTS}::test_update_from_output_routes_multi_position_sampling_masks": (0, 32),
    f"{SCHEDULER_TESTS}::test_async_scheduling_pp_allows_rescheduling_with_output_placeholders": (0, 33),
    f"{SCHEDULER_TESTS}::test_priority_scheduling_ec_connector_preemption_and_resumption": (0, 33),
    f"{SCHEDULER_TESTS}::test_empty_schedule_does_not_advance_the_prefill_cadence": (0, 33),
    f"{SCHEDULER_TESTS}::test_prefill_cadence_counts_executed_steps_not_schedule_calls": (0, 33),
}
_UNTIL: dict[str, tuple[int, ...]] = {
    f"{SCHEDULER_TESTS}::{test}": (0, 33)
    for test in (
        "test_update_from_output_routes_sampling_masks_by_request",
        "test_update_from_output_routes_multi_position_sampling_masks",
        "test_stop_via_update_from_output",
        "test_abort_request_when_structured_output_fsm_cannot_advance",
        "test_spec_decode_padding_skipped_for_diffusion",
        "test_ec_connector_allocate_encoder_tokens_with_external_load",
    )
}
_ALWAYS, _NEVER = (0,), (1_000,)


def stock_fails(guise: str, version: tuple[int, ...]) -> dict[str, str]:
    """Return the tests that vLLM's own class of that version fails in the same place, with the reason.

    They judge nobody there. A listed test has an entry in ``_SINCE`` with the first version in which that is so, and in
    ``_UNTIL`` with the first in which it no longer is.
    """
    listed = {**_FAILS_EVERYWHERE, **_STOCK_FAILS.get(guise, {})}
    return {
        test: reason
        for test, reason in listed.items()
        if _SINCE.get(test, _ALWAYS) <= version < _UNTIL.get(test, _NEVER)
    }


_WRITES_BOOKS = "writes the manager's own fields (`cached = {}`, `num_free_slots = 50`) to set its scene"

BOOKS_WRITTEN_BY_TEST: dict[str, str] = {
    f"{SCHEDULER_TESTS}::test_priority_scheduling_ec_connector_preemption_and_resumption": _WRITES_BOOKS,
    f"{SCHEDULER_TESTS}::test_encoder_cache_recomputed_when_evicted_during_preemption": _WRITES_BOOKS,
}
"""Tests after which the encoder cache does not add up, because the test itself made it so."""


def entry_for(test: str, entries: dict[str, str]) -> str | None:
    """The name under which a test is listed, or None."""
    return test if test in entries else next((name for name in entries if test.startswith(f"{name}[")), None)
