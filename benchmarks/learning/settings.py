"""Define engines under workloads. Tests share no kind of workload and no seed with training.

Sizes may be shared: the published distribution of text and output tokens is ServeGen's, and most kinds draw from it
(`Setting.has_sizes_of_training`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_sched.sim.costs.base import pick
from vllm_omni_sched.sim.costs.hardware import DEVICES
from vllm_omni_sched.sim.costs.models import MODELS
from vllm_omni_sched.sim.costs.roofline import RooflineCosts
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.work import Request
from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.registry import build


@dataclass(frozen=True)
class Setting:
    """Setting of a comparison: one engine under one workload.

    ``encodes``: the engine encodes, ahead of prefill in its lane; otherwise items come encoded.
    """

    name: str
    workload: Mapping[str, Any]
    model: str = "qwen2.5-vl-7b"
    device: str = "a100-80gb"
    devices: int = 1
    encodes: bool = False
    targets: tuple[float, float] = (2.0, 0.1)
    seconds: float = 60.0
    costs: RooflineCosts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape, device = pick("model", self.model, MODELS), pick("device", self.device, DEVICES)
        object.__setattr__(self, "costs", RooflineCosts(shape, device, self.devices))

    @property
    def has_sizes_of_training(self) -> bool:
        """Return whether some of its requests draw text and output tokens from the distribution used in training."""
        return bool(_kinds(self.workload) & _SERVEGEN_SIZES)

    @property
    def limits(self) -> EngineLimits:
        """Return vLLM's limits, with an encoder cache that holds the largest items of the workloads."""
        return EngineLimits(
            self.costs.kv_tokens, encoder_budget_embeds=32_768, encoder_cache_embeds=32_768, encodes=self.encodes
        )

    def requests(self, seed: int) -> Iterator[Request]:
        """Yield requests in order of arrival, without those that exceed the KV cache."""
        most = self.costs.kv_tokens
        for request in requests(build(self.workload), seed):
            if request.prompt_tokens + request.output_tokens <= most:
                yield request


_SERVEGEN_SIZES = {"servegen-mm-image", "text", "azure-lmm"}


def _kinds(workload: Mapping[str, Any]) -> set[str]:
    """Return the kind of a workload, and those inside it."""
    inner = [*workload.get("parts", ()), *([workload["of"]] if "of" in workload else [])]
    return {workload["kind"]}.union(*map(_kinds, inner))


def _servegen(rate: float) -> dict[str, Any]:
    return {"kind": "servegen-mm-image", "rate": rate}


TRAINING = (
    Setting("servegen-mm-image, 3/s", _servegen(3.0)),
    Setting("servegen-mm-image, 5/s", _servegen(5.0)),
    Setting("servegen-mm-image, 6/s", _servegen(6.0)),
    Setting("servegen-mm-image, 3/s, lane", _servegen(3.0), encodes=True),
    Setting("mixed, 24/s", {"kind": "mixed", "rate": 24.0, "embeds": 1024}),
)
TRAINING_SEEDS = range(1000, 1016)
VALIDATION_SEEDS = range(2000, 2006)

TEST = (
    Setting("azure-lmm", {"kind": "azure-lmm", "rate": 0.5}),
    Setting("video-clips", {"kind": "video-clips", "rate": 0.4, "tokens_per_frame": 256}),
    Setting(
        "day-night of text, H100",
        {"kind": "day-night", "rate": 20.0, "season_seconds": 60.0, "of": {"kind": "text"}},
        device="h100-80gb",
    ),
    Setting(
        "realtime and text",
        {"kind": "mix", "rate": 20.0, "parts": [{"kind": "realtime"}, {"kind": "text"}]},
        model="qwen2.5-omni-7b",
    ),
    Setting("text, 32B on 2 A100", {"kind": "text", "rate": 5.0}, model="qwen2.5-vl-32b", devices=2),
    Setting("text, 3B on an L40S, lane", {"kind": "text", "rate": 12.0}, model="qwen2.5-vl-3b", device="l40s"),
)
TEST_SEEDS = range(20)
