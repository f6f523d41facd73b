"""Define what a plan chooses: devices, how a model is split between them, flags of vLLM, options of this package."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import KEY, grouped, load_config
from vllm_omni_sched.resource.engine.lane import LaneFacts, refusal
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.costs.config_json import ConfiguredLlm
from vllm_omni_sched.sim.costs.hardware import DEVICES, DeviceKind, device
from vllm_omni_sched.sim.costs.measured import MeasuredCosts
from vllm_omni_sched.sim.costs.models import ModelShape, Precision, WeightFormat
from vllm_omni_sched.sim.costs.roofline import Efficiency, Parallel, RooflineCosts
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.tune.space import Options

PRICES = {
    "a100-40gb": 1.0,
    "a100-80gb": 1.3,
    "h100-80gb": 3.0,
    "h200-141gb": 4.0,
    "b200-180gb": 5.5,
    "l40s": 0.9,
    "a6000": 0.6,
}
"""US dollars for an hour of one device.

A100 80 GB, H100 and H200: the middle of the on-demand prices of specialised clouds in May 2026 (mercatus-ai.com, "Cloud
GPU pricing"). The others are assumed, in proportion. Prices differ by a factor of three between clouds.
"""
PRICES_OF = "May 2026"
NODE = 8
"""Devices of a node: the most that tensor parallelism spans."""


@dataclass(frozen=True)
class Flags:
    """Flags of vLLM that are searched, with vLLM's names. See `shipped` for its defaults."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True

    @property
    def possible(self) -> bool:
        """Return whether vLLM starts with them: a step has room for a token of each request."""
        return self.max_num_batched_tokens >= self.max_num_seqs


FLAG_VALUES: dict[str, tuple[Any, ...]] = {
    "max_num_batched_tokens": (2048, 1024, 512, 4096, 8192, 16384),
    "max_num_seqs": (256, 128, 64, 32, 512, 1024),
    "gpu_memory_utilization": (0.9, 0.95),
    "enable_prefix_caching": (True, False),
}
"""Values of each flag, in the order in which they are tried."""


def shipped(kind: DeviceKind | None) -> Flags:
    """Return vLLM's defaults for its API server on such a device.

    By ``EngineArgs.get_batch_defaults`` of vLLM 0.30: devices of 160 GiB, and those of 70 GiB but no A100, have larger
    steps.
    """
    if kind is not None and kind.memory_bytes >= 160 * 2**30:
        return Flags(16384, 1024)
    large = kind is not None and kind.memory_bytes >= 70 * 2**30 and not kind.name.startswith("a100")
    return Flags(8192, 1024) if large else Flags(2048, 256)


@dataclass(frozen=True)
class Layout:
    """Devices of a replica: their kind, and how they share the model. ``price``: of one device and hour."""

    device: str
    parallel: Parallel
    price: float

    @property
    def price_each(self) -> float:
        """Return the price of a replica for an hour."""
        return self.price * self.parallel.devices


@dataclass(frozen=True)
class System:
    """A way to serve: a layout with flags and options; ``options`` None: vLLM without this package."""

    layout: Layout
    flags: Flags
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Choices:
    """What a plan may choose from.

    ``shape``: the model; None with ``calibration``, whose costs stand for one device kind and one replica size.
    ``served``: the model's name in commands. ``most_devices``: in all. ``items``: whether requests have items.
    """

    shape: ModelShape | None
    served: str
    layouts: tuple[Layout, ...]
    most_devices: int
    items: bool
    precision: Precision = field(default_factory=Precision)
    calibration: MeasuredCosts | None = None
    efficiency: Efficiency = field(default_factory=Efficiency)

    def costs(self, layout: Layout, flags: Flags, better: str = "") -> EngineCosts:
        """Return the costs of a replica; ``better``: a resource of which there is twice as much.

        Raises:
            ConfigError: the model does not fit.
        """
        if self.calibration is not None:
            return self.calibration
        assert self.shape is not None
        kind, use = device(layout.device), replace(self.efficiency, memory=flags.gpu_memory_utilization)
        if better == "compute":
            kind = replace(kind, flops=2 * kind.flops, fp8_flops=2 * kind.fp8_flops)
        elif better == "memory bandwidth":
            kind = replace(kind, bandwidth_bytes_per_second=2 * kind.bandwidth_bytes_per_second)
        elif better == "links between devices":
            links = {name: 2 * getattr(kind, name) for name in ("nvlink_bytes_per_second", "pcie_bytes_per_second")}
            kind, use = replace(kind, **links), replace(use, all_reduce_seconds=use.all_reduce_seconds / 2)
        elif better == "host":
            halved = ("step_seconds", "request_seconds", "text_token_seconds", "answer_seconds")
            use = replace(use, **{name: getattr(use, name) / 2 for name in halved})
        return RooflineCosts(self.shape, kind, layout.parallel, use, self.precision)

    def limits(self, flags: Flags, costs: EngineCosts, better: str = "") -> EngineLimits:
        """Return the limits of an engine with these flags."""
        largest = self.shape.largest_item(min(self.shape.max_model_len, costs.kv_tokens)) if self.shape else 0
        embeds = max(flags.max_num_batched_tokens, largest)
        return EngineLimits(
            costs.kv_tokens * (2 if better == "KV memory" else 1),
            flags.max_num_seqs,
            flags.max_num_batched_tokens,
            embeds,
            embeds,
            prefix_caching=flags.enable_prefix_caching,
        )

    def accepted(self, system: System) -> bool:
        """Return whether a server starts with these flags and options: what is refused is not offered."""
        if not system.flags.possible:
            return False
        if system.options is None:
            return True
        split = system.layout.parallel
        facts = LaneFacts(multimodal=self.items, workers=split.devices, groups=split.pipeline)
        try:
            config = load_config({KEY: dict(system.options)})
        except ConfigError:
            return False
        return not (config.encode_ahead and refusal(facts))


def layouts(
    shape: ModelShape, kinds: Sequence[str], prices: Mapping[str, float], precision: Precision, most_devices: int
) -> list[Layout]:
    """Return all ways to split the model between devices of these kinds on which it fits.

    1. Tensor parallelism by 1, 2, 4 and 8, as far as it divides the heads.
    2. Pipeline stages only of whole nodes, and only if the model does not fit on one node.
    3. Whole experts as well as split ones, if the model has some and there are several devices.

    Raises:
        ConfigError: a device has no price, or the model fits on none; the message says how much is missing.
    """
    found: list[Layout] = []
    why: ConfigError | None = None
    for name in kinds:
        if name not in prices:
            raise ConfigError(f"the price of device {name!r} is not known: set it with --price {name}=DOLLARS")
        fits = False
        for split in _splits(shape):
            if (split.pipeline > 1 and fits) or split.devices > most_devices:
                continue
            try:
                RooflineCosts(shape, device(name), split, precision=precision)
            except ConfigError as error:
                why = why or error
                continue
            fits = True
            found.append(Layout(name, split, prices[name]))
    if not found:
        raise why or ConfigError(f"no device may be used: raise the limit of {most_devices} devices")
    return found


def _splits(shape: ModelShape) -> Iterator[Parallel]:
    tensors = [number for number in (1, 2, 4, 8) if shape.llm.heads % number == 0]
    for pipeline in (1, 2, 4):
        for tensor in tensors if pipeline == 1 else tensors[-1:]:
            yield Parallel(tensor, pipeline)
            if shape.llm.expert_parameters and tensor > 1:
                yield Parallel(tensor, pipeline, experts=True)


def with_context(shape: ModelShape, tokens: float) -> ModelShape:
    """Return the model for contexts of this mean length, of which sliding windows hold a part."""
    return replace(shape, llm=shape.llm.with_context(tokens)) if isinstance(shape.llm, ConfiguredLlm) else shape


def option_values(ttft_seconds: float, itl_seconds: float, items: bool) -> dict[str, tuple[Options, ...]]:
    """Return the options of this package that are searched, by group; each value sets several."""
    aims = [{"control_target_ms": float(f"{1e3 * part * itl_seconds:.3g}")} for part in (0.9, 0.6)]
    found: dict[str, tuple[Options, ...]] = {
        "prefill": (
            {},
            *({"prefill_control": mode, **aim} for aim in aims for mode in ("adaptive", "pid", "aimd")),
        ),
        "order": ({}, {"waiting_order": "sla"}),
        "batch": ({}, *({"batch_control": mode, "batch_max": 256, **aims[0]} for mode in ("pid", "aimd"))),
    }
    if items:
        aim = {"itl_target_ms": float(f"{1e3 * itl_seconds:.3g}")}
        found["encode"] = ({}, {"encode_ahead": True, **aim}, {"encode_rounds": True}, {"encoder_split": True, **aim})
        found["cache"] = ({}, {"encoder_cache_order": "worth"})
    targets = {"interactive_ttft_ms": 1e3 * ttft_seconds, "interactive_itl_ms": 1e3 * itl_seconds}
    return {"targets": (targets,), **found}


def command(choices: Choices, system: System) -> str:
    """Return the ``vllm serve`` command of a replica."""
    split, flags = system.layout.parallel, system.flags
    words = ["vllm", "serve", choices.served]
    words += ["--tensor-parallel-size", str(split.tensor)] if split.tensor > 1 else []
    words += ["--pipeline-parallel-size", str(split.pipeline)] if split.pipeline > 1 else []
    words += ["--enable-expert-parallel"] if split.experts else []
    if choices.shape is not None and choices.precision.weights != choices.shape.precision.weights:
        words += ["--quantization", "fp8"] if choices.precision.weights is WeightFormat.FP8 else []
    words += ["--kv-cache-dtype", "fp8"] if choices.precision.kv_fp8 else []
    words += ["--max-num-batched-tokens", str(flags.max_num_batched_tokens), "--max-num-seqs", str(flags.max_num_seqs)]
    words += ["--gpu-memory-utilization", f"{flags.gpu_memory_utilization:g}"]
    words += ["--enable-prefix-caching" if flags.enable_prefix_caching else "--no-enable-prefix-caching"]
    if system.options is not None:
        words += ["--scheduler-cls", "vllm_omni_sched.OmniScheduler"]
        words += ["--additional-config", json.dumps({KEY: grouped(system.options)})]
    return shlex.join(words)


def known_devices() -> tuple[str, ...]:
    """Return the kinds of devices that are tried by default: those with a price."""
    return tuple(name for name in DEVICES if name in PRICES)
