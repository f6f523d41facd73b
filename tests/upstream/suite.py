"""Which of vLLM's own tests judge us, in which guise, and what cannot apply."""

from __future__ import annotations

from dataclasses import dataclass

CORE = "tests/v1/core"
KV = "tests/v1/kv_connector/unit"
STREAMING = "tests/v1/streaming_input/test_scheduler_streaming.py"

CACHE_TESTS = f"{CORE}/test_encoder_cache_manager.py"
SCHEDULER_TESTS = f"{CORE}/test_scheduler.py"
ASYNC_TESTS = f"{CORE}/test_async_scheduler.py"

# Methods of the model runners that our mixins wrap.
RUNNER_TESTS = (
    "tests/v1/streaming_input/test_gpu_model_runner_v2_streaming.py",
    "tests/v1/worker/test_encoder_runner.py",
    "tests/v1/worker/test_gpu_model_runner_mm_gather.py",
    "tests/v1/worker/test_gpu_model_runner.py",
)

# Of these files only tests with that word in their name: the others are about weights and KV caches.
PARTS = {"tests/v1/worker/test_gpu_model_runner.py": "update_states"}

# Tests that build a scheduler for something else: preemption, prefix caching, connectors, speculative decoding.
OTHER_TESTS = (
    f"{CORE}/test_deferred_block_free.py",
    f"{CORE}/test_worker_slot_overflow.py",
    f"{CORE}/test_swa_inflight_window_free.py",
    f"{CORE}/test_mamba_align_chunk_split.py",
    f"{CORE}/test_output.py",
    f"{CORE}/test_prefix_caching.py",
    f"{CORE}/test_prefix_replay.py",
    f"{CORE}/prefix_cache/test_partial_prefix_cache_hits.py",
    f"{CORE}/prefix_cache/test_mamba_eagle_resume_checkpoint.py",
    "tests/v1/ec_connector/unit/test_ec_transfer_params.py",
    f"{KV}/test_error_propagation.py",
    f"{KV}/test_invalid_blocks_correctness.py",
    f"{KV}/test_kv_load_failure_recovery.py",
    f"{KV}/test_remote_decode_lifecycle.py",
    f"{KV}/test_remote_prefill_lifecycle.py",
    f"{KV}/test_cache_pollution_prevention.py",
    f"{KV}/test_scheduler_kv_connector_override.py",
    f"{KV}/test_decode_bench_connector.py",
    "tests/v1/spec_decode/test_dynamic_sd.py",
)

# These feed a step's tokens back before the next step and count on it.
SYNCHRONOUS_TESTS = (
    f"{CORE}/test_priority_scheduler_random.py",
    f"{CORE}/test_priority_preemption_bug.py",
)


@dataclass(frozen=True)
class Guise:
    """One way of putting our classes in the place of vLLM's, and the options under which vLLM's own are compared."""

    name: str
    files: tuple[str, ...]
    options: tuple[str, ...]
    stock_options: tuple[str, ...] = ("--swap=none",)
    long: bool = True  # run by make test-long alone

    @property
    def stock_files(self) -> tuple[str, ...]:
        """Return the files of all guises with equal options for vLLM's own classes, which then run only once.

        Those of long guises run apart from those that `make test` needs.
        """
        alike = [g for g in GUISES if (g.stock_options, g.long) == (self.stock_options, self.long)]
        return tuple(dict.fromkeys(path for g in alike for path in g.files))


SYNC = Guise(
    "sync",
    (SCHEDULER_TESTS, ASYNC_TESTS, CACHE_TESTS, STREAMING, *RUNNER_TESTS),
    ("--swap=scheduler",),
    long=False,
)
SYNC_ELSEWHERE = Guise("sync-elsewhere", (*SYNCHRONOUS_TESTS, *OTHER_TESTS), ("--swap=scheduler",))
# Whatever a test builds by the name Scheduler is asynchronous.
ASYNC = Guise(
    "async",
    (SCHEDULER_TESTS, STREAMING, *OTHER_TESTS),
    ("--swap=scheduler", "--force-async"),
    ("--swap=none", "--force-async"),
)
# Our windows also where vLLM bisects by itself and they would stand aside.
WINDOWS = Guise(
    "windows",
    (SCHEDULER_TESTS, ASYNC_TESTS, STREAMING, *RUNNER_TESTS),
    ("--swap=scheduler", "--narrow"),
)
# Our cache manager under vLLM's scheduler.
CACHE_ALONE = Guise("cache-alone", (CACHE_TESTS, SCHEDULER_TESTS, ASYNC_TESTS), ("--swap=cache",))

GUISES = (SYNC, SYNC_ELSEWHERE, ASYNC, WINDOWS, CACHE_ALONE)
