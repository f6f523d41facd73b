"""Which engine a run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OURS = "vllm_omni_sched.OmniScheduler"
OURS_SYNC = "vllm_omni_sched.OmniSyncScheduler"
OUR_ENCODER_CACHE = "vllm_omni_sched.OmniEncoderCacheManager"


@dataclass(frozen=True)
class EngineSpec:
    """One engine and the scenarios it runs, in order. Plain data: it travels to the worker process as JSON.

    `args` are fields of vLLM's `EngineArgs`; `omni_sched` becomes `additional_config["omni_sched"]`.
    `processes`: engine core and worker in processes of their own, driven through `AsyncLLM`; else all in this one.
    `async_scheduling` is forced, where vLLM's CPU platform would turn it off (see `async_on_cpu.py`).
    """

    name: str
    model: str
    scenarios: Sequence[str]
    scheduler: str | None = None
    encoder_cache_manager: str | None = None
    omni_sched: Mapping[str, Any] | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    async_scheduling: bool = False
    processes: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def engine_args(self) -> dict[str, Any]:
        args: dict[str, Any] = {
            "model": self.model,
            "dtype": "float32",
            "enforce_eager": True,
            "seed": 0,
            "block_size": 32,
            **self.args,
        }
        if self.scheduler is not None:
            args["scheduler_cls"] = self.scheduler
        if isinstance(args.get("ec_transfer_config"), Mapping):
            from vllm.config import ECTransferConfig

            args["ec_transfer_config"] = ECTransferConfig(**args["ec_transfer_config"])
        if self.omni_sched is not None:
            args["additional_config"] = {"omni_sched": dict(self.omni_sched)}
        if self.encoder_cache_manager is not None:
            args["ec_manager_config"] = {"encoder_cache_manager_cls": self.encoder_cache_manager}
        return args
