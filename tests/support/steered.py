"""Make a real scheduler with our options, and requests with deadlines."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_omni_sched import OmniScheduler, OmniSyncScheduler
from vllm_omni_sched.testing import make_request, make_scheduler, run_step

EMBEDS = 8


def scheduler_with(options: dict[str, Any], *, async_scheduling: bool = False, **config: Any) -> Any:
    return make_scheduler(
        OmniScheduler if async_scheduling else OmniSyncScheduler,
        async_scheduling=async_scheduling,
        max_item_embeds=EMBEDS,
        options={"metrics": False, **options},
        **{"max_num_batched_tokens": 64, "encoder_cache_size": 64, "enable_prefix_caching": False, **config},
    )


def request(id_: str, prompt: int = 8, items: Any = (), *, max_tokens: int = 4, priority: int = 0, **extra: Any) -> Any:
    made = make_request(id_, prompt, items, max_tokens=max_tokens, priority=priority)
    made.sampling_params.extra_args = extra or None
    return made


def first_steps(scheduler: Any, count: int) -> list[list[str]]:
    """Return the new requests of each of the next steps."""
    return [[new.req_id for new in run_step(scheduler).scheduled.scheduled_new_reqs] for _ in range(count)]


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("vllm_omni_sched.engine.steered.monotonic_seconds", lambda: self.now)
