"""The engines that the tests compare, all with core, scheduler and worker in one process, and what each one runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness.scenarios import RUN_AT_ONCE
from tests.engine.harness.spec import OUR_ENCODER_CACHE, OURS, OURS_SYNC, EngineSpec
from tests.support.environments import FIRST_ENVIRONMENT

REQUESTS = ("text", "images", "repeated_images", "shared_images", "prefixes", "aborts")
SHORT = (*REQUESTS, "sessions")
RETURNING = ("returning_images",)
SEEDED = "seeded"  # stock answers it where a prompt takes one step, and ends where it takes several
STOPS = "turns_that_stop"  # under async scheduling, stock 0.30 fails, or gives tokens too many
TOO_LONG = "too_long"
BAD_INPUT = ("straggler", "reversed_images", TOO_LONG)  # ours alone: stock does not survive it, or answers wrongly

AMPLE = {
    "max_model_len": 16384,
    "max_num_batched_tokens": 512,
    "limit_mm_per_prompt": {"image": 8},
    "num_gpu_blocks_override": 700,
}
# an encoder cache of 12 pictures
CHUNKED = {**AMPLE, "max_num_batched_tokens": 48, "max_num_seqs": 16, "enable_prefix_caching": False}
# 768 tokens of KV cache for what needs 2,000 at a time
TIGHT = {**AMPLE, "max_model_len": 640, "num_gpu_blocks_override": 24}
# the same, and an encoder cache of 16 pictures: of a preempted session's items few are left
SCARCE = {**TIGHT, "max_num_batched_tokens": 64, "max_num_seqs": 16}
SPEECH = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 200,
    "tokenizer_mode": "mistral",
    "config_format": "mistral",
}
WITHOUT_PREFIX_CACHING = {"enable_prefix_caching": False}

AHEAD = {"encode_ahead": True}
HOST = {**AHEAD, "encoder_cache_host_bytes": 1 << 20}
STEERED = {
    **AHEAD,
    "waiting_order": "sla",
    "batch_control": "pid",
    "prefill_control": "adaptive",
    "prefill_min_tokens": 16,
    "control_interval_ms": 20,
    "pieces": True,
    "slo_metrics": True,
}
ROUNDS = {
    "encode_rounds": True,
    "interactive_itl_ms": 0.001,  # less than any encode: what decodes is in the way of each
    "max_wait_seconds": 0.2,
}
EVERYTHING_OFF = {
    **dict.fromkeys(
        (
            "windows",
            "encoder_cache",
            "strip_frontier",
            "pending_range",
            "kv_event_window",
            "session_delta",
            "mrope_append",
        ),
        "off",
    ),
    "release": "keep",
    "metrics": False,
}


@dataclass(frozen=True)
class Variant:
    """One of our engines, and the engine of stock that it must not be told from."""

    name: str
    stock: str
    scenarios: Sequence[str] | None = None  # None: those of the stock engine
    scheduler: str | None = OURS
    encoder_cache_manager: str | None = None
    omni_sched: Mapping[str, Any] | None = None
    long: bool = False  # run by make test-long alone: another variant has the same options, in another combination
    newest: bool = False  # in make test in .venv-latest alone: what it adds does not depend on the version of vLLM

    @property
    def runs_long(self) -> bool:
        """Whether make test-long runs it, in this environment."""
        return self.long or (self.newest and FIRST_ENVIRONMENT)

    def spec(self, stock: EngineSpec) -> EngineSpec:
        return replace(
            stock,
            name=self.name,
            scenarios=stock.scenarios if self.scenarios is None else self.scenarios,
            scheduler=self.scheduler,
            encoder_cache_manager=self.encoder_cache_manager,
            omni_sched=self.omni_sched,
        )


VARIANTS = (
    # first: once an engine with our scheduler has run in a process, that process is no longer stock
    Variant("no-flag", "sync", SHORT, scheduler=None),
    Variant("sync", "sync"),
    Variant("sync-by-name", "sync", ("sessions", "aborts"), scheduler=OURS_SYNC, long=True),
    Variant("async", "async", (*SHORT, SEEDED, "crowd", "long_session", STOPS)),
    Variant("chunked", "chunked", (*SHORT, *RETURNING, SEEDED)),
    Variant("prefix-caching-off", "prefix-caching-off", newest=True),
    Variant("cache-manager-alone", "sync", SHORT, scheduler=None, encoder_cache_manager=OUR_ENCODER_CACHE),
    Variant("delta-off", "async", ("sessions", "aborts", "crowd"), omni_sched={"session_delta": "off"}),
    Variant(
        "subclass-sync",
        "sync",
        ("sessions", "aborts"),
        scheduler="tests.engine.harness.subclass.CustomScheduler",
        long=True,
    ),
    Variant(
        "subclass",
        "async",
        ("sessions",),
        scheduler="tests.engine.harness.subclass.CustomScheduler",
        newest=True,
    ),
    Variant("everything-off", "async", ("sessions", "aborts"), omni_sched=EVERYTHING_OFF, newest=True),
    Variant("bad-input", "sync", BAD_INPUT),
    Variant("bad-input-async", "async", BAD_INPUT),
    Variant("bad-input-no-prefix", "prefix-caching-off", BAD_INPUT, long=True),
    Variant("tight", "tight", long=True),
    Variant("tight-async", "tight-async", omni_sched={"slo_metrics": True}),  # which changes no decision
    Variant("scarce", "scarce", long=True),
    Variant("scarce-async", "scarce-async"),
    Variant("scarce-no-prefix", "scarce-no-prefix", long=True),
    Variant("scarce-spill", "scarce-async-no-prefix", omni_sched={"release_batch_items": 1}, newest=True),
    Variant("scarce-delta-off", "scarce-async-no-prefix", omni_sched={"session_delta": "off"}, long=True),
    # other decisions than stock's, the same tokens
    Variant("encode-ahead", "sync", omni_sched=AHEAD, long=True),
    Variant("encode-ahead-async", "async", omni_sched=AHEAD),
    Variant("encode-ahead-chunked", "chunked", omni_sched=AHEAD, long=True),
    Variant("tight-encode-ahead", "tight", omni_sched=AHEAD, long=True),
    Variant("scarce-encode-ahead", "scarce-async", omni_sched=AHEAD),
    Variant("encode-ahead-host", "chunked", omni_sched=HOST, long=True),
    Variant("scarce-host", "scarce-async", omni_sched=HOST, newest=True),
    Variant("steered-encode-ahead", "sync", (*SHORT, "crowd"), omni_sched=STEERED, long=True),
    Variant(
        "steered-encode-ahead-async", "async", ("images", "shared_images", "crowd"), omni_sched=STEERED, newest=True
    ),
    Variant("scarce-steered-encode-ahead", "scarce-async", omni_sched=STEERED, long=True),
    Variant("encode-rounds", "sync", SHORT, omni_sched=ROUNDS, long=True),
    Variant("encode-rounds-async", "async", (*SHORT, "crowd"), omni_sched=ROUNDS, newest=True),
    Variant("encode-rounds-chunked", "chunked", SHORT, omni_sched=ROUNDS, long=True),
    Variant("scarce-encode-rounds", "scarce-async", omni_sched=ROUNDS, long=True),
    # options that users name, under load (test_under_load.py)
    Variant("load", "load"),
    Variant("steered-load-chat", "load", omni_sched={"profile": "chat"}, newest=True),
    Variant("steered-load-realtime", "load", omni_sched={"profile": "realtime"}, newest=True),
    Variant("steered-load-video", "load", omni_sched={"profile": "video"}, newest=True),
    Variant("speech", "speech"),
    Variant("speech-async", "speech-async"),
)

COMPARED_WITH_OTHERS = {"sync", "async", "chunked", "speech"}
"""Engines of stock whose answers tests compare with each other, or with an engine under another setting."""


def settings(llava: Path, voxtral: Path) -> list[EngineSpec]:
    """Return stock under every setting that ours runs under. `llava` costs four tokens a picture."""
    pictures, sound = str(llava), str(voxtral)
    return [
        EngineSpec("sync", pictures, (*SHORT, SEEDED, STOPS, "other_images", "crowd", "long_session"), args=AMPLE),
        EngineSpec("async", pictures, (*SHORT, SEEDED, "crowd", "long_session"), args=AMPLE, async_scheduling=True),
        EngineSpec("chunked", pictures, (*SHORT, *RETURNING), args=CHUNKED, async_scheduling=True),
        EngineSpec("prefix-caching-off", pictures, SHORT, args=AMPLE | WITHOUT_PREFIX_CACHING),
        EngineSpec("load", pictures, ("rush",), args={**AMPLE, "max_num_seqs": RUN_AT_ONCE}),
        EngineSpec("speech", sound, ("speech",), args=SPEECH),
        EngineSpec("speech-async", sound, ("speech",), args=SPEECH, async_scheduling=True),
        EngineSpec("tight", pictures, ("crowd",), args=TIGHT),
        EngineSpec("tight-async", pictures, ("crowd",), args=TIGHT, async_scheduling=True),
        EngineSpec("scarce", pictures, ("crowd",), args=SCARCE),
        EngineSpec("scarce-async", pictures, ("crowd",), args=SCARCE, async_scheduling=True),
        EngineSpec("scarce-no-prefix", pictures, ("crowd",), args=SCARCE | WITHOUT_PREFIX_CACHING),
        EngineSpec(
            "scarce-async-no-prefix",
            pictures,
            ("crowd",),
            args=SCARCE | WITHOUT_PREFIX_CACHING,
            async_scheduling=True,
        ),
    ]


def stock_engines(llava: Path, voxtral: Path, variants: Sequence[Variant] = VARIANTS) -> list[EngineSpec]:
    """Return the engines of stock that these variants are compared with, and those that tests compare with others.

    Stock does not survive the scarce settings (see `test_preemption.py`): there, ours has the answers of `sync`.
    """
    wanted = {variant.stock for variant in variants} | COMPARED_WITH_OTHERS
    return [spec for spec in settings(llava, voxtral) if spec.name in wanted and not spec.name.startswith("scarce")]


def our_engines(llava: Path, voxtral: Path, variants: Sequence[Variant] = VARIANTS) -> list[EngineSpec]:
    by_name = {spec.name: spec for spec in settings(llava, voxtral)}
    return [variant.spec(by_name[variant.stock]) for variant in variants]


def cases(parts: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return parameters for tests, of which the first is a variant; they have the marks of their variants."""
    return [
        pytest.param(
            *part,
            id="-".join([part[0].name, *part[1:]]),
            marks=[getattr(pytest.mark, mark) for mark in ("long", "newest") if getattr(part[0], mark)],
        )
        for part in parts
    ]


def our_served_engines(llava: Path) -> list[EngineSpec]:
    """Return ours in processes, and another one with the options for sessions."""
    ours = replace(served_engine(llava), scheduler=OURS)
    ours = replace(ours, scenarios=(*ours.scenarios, STOPS, TOO_LONG))
    options = {"profile": "realtime"}
    return [ours, replace(ours, name="served-realtime", scenarios=(STOPS, TOO_LONG), omni_sched=options)]


def served_engine(llava: Path) -> EngineSpec:
    """Stock in processes of its own, with everything that is short or sessions."""
    return EngineSpec("served", str(llava), (*SHORT, "long_session"), args=AMPLE, processes=True)
