"""Define what a plan chooses: devices, how a model is split between them, flags of vLLM, options of this package."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.load import KEY, grouped, load_config
from vllm_omni_sched.resource.engine.lane import LaneFacts, refusal
from vllm_omni_sched.sim.costs.base import EngineCosts, Source, SourceKind
from vllm_omni_sched.sim.costs.configured.decoder import ConfiguredLlm
from vllm_omni_sched.sim.costs.drafted import DraftedCosts
from vllm_omni_sched.sim.costs.hardware import DEVICES, DeviceKind, Link, device
from vllm_omni_sched.sim.costs.measured import MeasuredCosts
from vllm_omni_sched.sim.costs.models import ModelShape, Precision, WeightFormat
from vllm_omni_sched.sim.costs.roofline import Efficiency, Parallel, RooflineCosts
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.speculation import Speculation
from vllm_omni_sched.sim.tune.space import Options

_CLOUDS = 'the middle of on-demand prices of specialised clouds, May 2026 (mercatus-ai.com, "Cloud GPU pricing")'

PRICES = {
    "a100-40gb": 1.0,
    "a100-80gb": 1.3,
    "h100-80gb": 3.0,
    "h200-141gb": 4.0,
    "b200-180gb": 6.0,
    "l40s": 1.0,
    "a6000": 0.8,
}
"""US dollars for an hour of one device. `PRICE_SOURCES` says where each is from."""
PRICE_SOURCES = {
    "a100-40gb": Source(SourceKind.PUBLISHED, "RunPod's community cloud, SXM 40 GB, August 2026"),
    "a100-80gb": Source(SourceKind.PUBLISHED, _CLOUDS),
    "h100-80gb": Source(SourceKind.PUBLISHED, _CLOUDS),
    "h200-141gb": Source(SourceKind.PUBLISHED, _CLOUDS),
    "b200-180gb": Source(
        SourceKind.PUBLISHED,
        "RunPod's community cloud, August 2026; Akash has 5.00 and Lambda 6.69 (September 2026)",
    ),
    "l40s": Source(SourceKind.ASSUMED, "above Verda's price for spot instances, 0.94 in October 2026"),
    "a6000": Source(SourceKind.PUBLISHED, "Verda, on-demand, October 2026"),
}
"""Source of each of `PRICES`. Prices differ by a factor of three between clouds."""
NODE = 8
"""Devices of a node: the most that tensor parallelism spans."""
PLACEHOLDER = "MODEL"
"""Name of the model in commands where none is known."""
_BLOCK = 16  # tokens of a block of vLLM's KV cache; it keeps one block back
_TRUSTED = 0.9  # of the predicted room for one request: what a command counts on, as the prediction may be too large
_LENGTHS = 1024  # `--max-model-len` is a multiple of it, unless the longest request needs more


@dataclass(frozen=True)
class Flags:
    """Flags of vLLM that are searched, with vLLM's names. See `shipped` for its defaults.

    ``num_speculative_tokens``: 0 without speculative decoding.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0

    @property
    def possible(self) -> bool:
        """Return whether vLLM starts with them, and a step has room for all tokens of each request."""
        return self.max_num_batched_tokens >= self.max_num_seqs * (1 + self.num_speculative_tokens)


FLAG_VALUES: dict[str, tuple[Any, ...]] = {
    "max_num_batched_tokens": (2048, 1024, 512, 4096, 8192, 16384),
    "max_num_seqs": (256, 128, 64, 32, 512, 1024),
    "gpu_memory_utilization": (0.9, 0.95),
    "enable_prefix_caching": (True, False),
}
"""Values of each flag, in the order in which they are tried."""
DRAFT_TOKENS = (0, 2, 4, 1, 3, 6)
"""Values of ``num_speculative_tokens``, where there is a drafter."""


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
class Prefill:
    """Replicas that compute prompts for those that decode: ``replicas`` of them for ``decodes`` of the others."""

    layout: Layout
    flags: Flags
    replicas: int = 1
    decodes: int = 1


@dataclass(frozen=True)
class System:
    """A way to serve: a layout with flags and options; ``options`` None: vLLM without this package.

    ``prefill``: replicas that compute the prompts; None: each replica computes its own. With it, a plan counts groups
    of replicas that have nothing to do with each other.
    """

    layout: Layout
    flags: Flags
    options: Mapping[str, Any] | None = None
    prefill: Prefill | None = None

    @property
    def devices(self) -> int:
        """Return the devices of a replica, or of a group of them."""
        if self.prefill is None:
            return self.layout.parallel.devices
        other = self.prefill
        return other.replicas * other.layout.parallel.devices + other.decodes * self.layout.parallel.devices

    @property
    def price(self) -> float:
        """Return the price of a replica, or of a group of them, for an hour."""
        if self.prefill is None:
            return self.layout.price_each
        return self.prefill.replicas * self.prefill.layout.price_each + self.prefill.decodes * self.layout.price_each

    def apart(self, prefills: int, decodes: int) -> tuple["System", int]:
        """Return the system with so many replicas of each kind in all, and the number of groups.

        Requests go to the replicas of each kind in turn. So those of a group meet no others.
        """
        assert self.prefill is not None
        groups = math.gcd(prefills, decodes)
        other = replace(self.prefill, replicas=prefills // groups, decodes=decodes // groups)
        return replace(self, prefill=other), groups


@dataclass(frozen=True)
class Drafter:
    """The user's speculative decoding.

    ``method``: as in vLLM's ``--speculative-config``; ``model``: the drafter's, empty for n-grams. ``acceptance``: of a
    draft token, if all before it were accepted, as measured. ``draft``: the part of a decode step that making one
    draft token takes; a drafter's weights are taken to be the same part of the model's.
    """

    method: str
    acceptance: float
    draft: float
    model: str = ""


@dataclass(frozen=True)
class Choices:
    """What a plan may choose from.

    ``shape``: the model; None with ``calibration``, whose costs stand for one device kind and one replica size.
    ``served``: the model's name in commands. ``most_devices``: in all. ``items``: whether requests have items.
    ``drafter``: the speculative decoding that may be used; ``link``: that of a device, over which prefill replicas may
    send the KV cache; None: neither is tried. ``longest``: tokens of the longest request with its answer; a replica
    must have room for it. ``notes``: what the reader of a command has to know.
    """

    shape: ModelShape | None
    served: str
    layouts: tuple[Layout, ...]
    most_devices: int
    items: bool
    precision: Precision = field(default_factory=Precision)
    calibration: MeasuredCosts | None = None
    efficiency: Efficiency = field(default_factory=Efficiency)
    drafter: Drafter | None = None
    link: Link | None = None
    longest: int = 1
    notes: tuple[str, ...] = ()

    @property
    def flag_values(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of each flag that are tried, in that order."""
        drafts: dict[str, tuple[Any, ...]] = {"num_speculative_tokens": DRAFT_TOKENS} if self.drafter else {}
        return {**drafts, **FLAG_VALUES}

    def costs(self, layout: Layout, flags: Flags, better: str = "") -> EngineCosts:
        """Return the costs of a replica; ``better``: a resource of which there is twice as much.

        Raises:
            ConfigError: the model does not fit.
        """
        if self.calibration is not None:
            return self.calibration
        alone = self._roofline(layout, flags, better)
        if not flags.num_speculative_tokens:
            return alone
        assert self.drafter is not None
        drafts, each = flags.num_speculative_tokens, self.drafter.draft
        found = DraftedCosts(self._roofline(layout, flags, better, 1 + drafts), alone, drafts * each)
        found.kv_tokens -= math.ceil(each * alone.model.weight_bytes(self.precision.weights) / self._kv_bytes(layout))
        if found.kv_tokens < 1:
            raise ConfigError(f"the drafter does not fit beside {alone.model.name!r}")
        return found

    def _kv_bytes(self, layout: Layout) -> float:
        assert self.shape is not None
        return self.precision.kv_bytes * self.shape.llm.kv_numbers_per_token(layout.parallel.tensor)

    def link_of(self, system: System, better: str = "") -> tuple[float, Link, int]:
        """Return (KV bytes of a token, link of a device, links of a transfer) between the two kinds of replicas."""
        assert system.prefill is not None
        assert self.link is not None
        link = self.link
        if better == "links for KV caches":
            link = replace(link, bytes_per_second=2 * link.bytes_per_second)
        links = min(system.prefill.layout.parallel.devices, system.layout.parallel.devices)
        return self._kv_bytes(system.layout), link, links

    def _roofline(self, layout: Layout, flags: Flags, better: str, queries: int = 1) -> RooflineCosts:
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
        return RooflineCosts(self.shape, kind, layout.parallel, use, self.precision, queries)

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
            speculation=self._speculation(flags),
        )

    def _speculation(self, flags: Flags) -> Speculation | None:
        if not flags.num_speculative_tokens:
            return None
        assert self.drafter is not None
        return Speculation(flags.num_speculative_tokens, self.drafter.acceptance)

    def _has_room(self, layout: Layout, flags: Flags) -> bool:
        try:
            return self.room(layout, flags) >= self.longest
        except ConfigError:
            return False

    def room(self, layout: Layout, flags: Flags) -> int:
        """Return the tokens of the longest request for which the KV cache of a replica has room.

        Raises:
            ConfigError: the model does not fit.
        """
        return room_of(self.shape, self.costs(layout, flags).kv_tokens, layout.parallel, flags)

    def max_model_len(self, layout: Layout, flags: Flags) -> int | None:
        """Return the ``--max-model-len`` with which a replica starts; None: that of the model.

        vLLM only starts if its KV cache has room for one request of that length. Where nine tenths of the predicted
        room are less than the model's context, they are the length, or the longest request if that is longer.
        """
        if self.shape is None:
            return None
        room = self.room(layout, flags)
        trusted = int(_TRUSTED * room)
        if self.shape.max_model_len <= trusted:
            return None
        return min(max(trusted // _LENGTHS * _LENGTHS, self.longest), self.shape.max_model_len)

    def accepted(self, system: System) -> bool:
        """Return whether a server starts with these flags and options: what is refused is not offered."""
        if not system.flags.possible or (system.prefill is not None and not system.prefill.flags.possible):
            return False
        if system.flags.num_speculative_tokens and system.layout.parallel.pipeline > 1:
            return False
        if not self._has_room(system.layout, system.flags):
            return False
        if system.prefill is not None and not self._has_room(system.prefill.layout, system.prefill.flags):
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


class Offer(NamedTuple):
    """Layouts that may be used.

    ``refused``: those on which the model fits, but not the longest request; with the reason, for the user.
    """

    layouts: tuple[Layout, ...]
    refused: tuple[str, ...] = ()


def offer(
    shape: ModelShape,
    kinds: Sequence[str],
    prices: Mapping[str, float],
    precision: Precision,
    most_devices: int,
    longest: int = 1,
) -> Offer:
    """Return all ways to split the model between devices of these kinds on which it fits.

    1. Tensor parallelism by 1, 2, 4 and 8, as far as it divides the heads.
    2. Pipeline stages only of whole nodes, and only if the model does not fit on one node.
    3. Whole experts as well as split ones, if the model has some and there are several devices.
    4. Only where the KV cache has room for a request of ``longest`` tokens.

    Raises:
        ConfigError: a device has no price, or model and request fit on none; the message says how much is missing.
    """
    found: list[Layout] = []
    refused: list[str] = []
    why: ConfigError | None = None
    for name in kinds:
        if name not in prices:
            raise ConfigError(f"the price of device {name!r} is not known: set it with --price {name}=DOLLARS")
        fits = False
        for split in _splits(shape):
            if (split.pipeline > 1 and fits) or split.devices > most_devices:
                continue
            try:
                tokens = RooflineCosts(shape, device(name), split, precision=precision).kv_tokens
            except ConfigError as error:
                why = why or error
                continue
            room = room_of(shape, tokens, split, shipped(DEVICES.get(name)))
            if room < longest:
                refused.append(f"{_named(name, split)} has room for a request of {room:,} tokens")
                continue
            fits = True
            found.append(Layout(name, split, prices[name]))
    if not found and refused:
        raise ConfigError(
            f"the longest request has {longest:,} tokens with its answer, but the KV cache of {refused[-1]}: use "
            "larger devices, raise --max-gpus, set --kv-fp8, or leave such requests out"
        )
    if not found:
        raise why or ConfigError(f"no device may be used: raise the limit of {most_devices} devices")
    return Offer(tuple(found), tuple(refused))


def room_of(shape: ModelShape | None, kv_tokens: int, split: Parallel, flags: Flags) -> int:
    """Return the tokens of the longest request for which a KV cache has room, as vLLM counts it at its start.

    Layers with a sliding window hold the window and the tokens of the steps in flight; ``kv_tokens`` is for contexts of
    the mean length.
    """
    room = max(0, (kv_tokens // _BLOCK - 1) * _BLOCK)
    llm = None if shape is None else shape.llm
    if not isinstance(llm, ConfiguredLlm) or not llm.sliding_layers:
        return room
    memory = room * llm.kv_numbers_per_token(split.tensor)
    in_flight = flags.max_num_batched_tokens * max(2, split.pipeline)
    held = replace(llm, window=llm.window + in_flight, window_share=1.0)
    low, high = 0, int(memory)
    while low < high:
        middle = (low + high + 1) // 2
        if middle * held.with_context(middle).kv_numbers_per_token(split.tensor) <= memory:
            low = middle
        else:
            high = middle - 1
    return low // _BLOCK * _BLOCK


def _named(name: str, split: Parallel) -> str:
    experts = " with whole experts" if split.experts else ""
    stages = f" in {split.pipeline} stages" if split.pipeline > 1 else ""
    return f"{split.devices} x {name}{stages}{experts}"


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


def draft_of_a_layer(shape: ModelShape) -> float:
    """Return the part of a model's weights that one layer and the output matrix are, as EAGLE's drafters have them."""
    llm = shape.llm
    whole = llm.layer_parameters + llm.head_parameters
    return (llm.layer_parameters / llm.layers + llm.head_parameters) / whole


def command(choices: Choices, system: System) -> str:
    """Return the ``vllm serve`` command of a replica; of a prefill and a decode replica a line each."""
    if system.prefill is None:
        return shlex.join(_words(choices, system))
    lines = []
    for one, role in ((System(system.prefill.layout, system.prefill.flags), "producer"), (system, "consumer")):
        config = {"kv_connector": "NixlConnector", "kv_role": f"kv_{role}"}
        lines.append(shlex.join([*_words(choices, one), "--kv-transfer-config", json.dumps(config)]))
    return "\n".join(lines)


def _words(choices: Choices, system: System) -> list[str]:
    split, flags, shape = system.layout.parallel, system.flags, choices.shape
    words = ["vllm", "serve", choices.served]
    words += ["--trust-remote-code"] if shape is not None and shape.remote_code and choices.served == shape.hub else []
    words += ["--tensor-parallel-size", str(split.tensor)] if split.tensor > 1 else []
    words += ["--pipeline-parallel-size", str(split.pipeline)] if split.pipeline > 1 else []
    words += ["--enable-expert-parallel"] if split.experts else []
    length = choices.max_model_len(system.layout, flags)
    words += ["--max-model-len", str(length)] if length is not None else []
    if shape is not None and quantized_at_start(shape.precision.weights, choices.precision.weights):
        words += ["--quantization", choices.precision.weights.value]
    words += ["--kv-cache-dtype", "fp8"] if choices.precision.kv_fp8 else []
    words += ["--max-num-batched-tokens", str(flags.max_num_batched_tokens), "--max-num-seqs", str(flags.max_num_seqs)]
    words += ["--gpu-memory-utilization", f"{flags.gpu_memory_utilization:g}"]
    words += ["--enable-prefix-caching" if flags.enable_prefix_caching else "--no-enable-prefix-caching"]
    if flags.num_speculative_tokens:
        assert choices.drafter is not None
        config = {"method": choices.drafter.method, "num_speculative_tokens": flags.num_speculative_tokens}
        config |= {"model": choices.drafter.model} if choices.drafter.model else {}
        words += ["--speculative-config", json.dumps(config)]
    if system.options is not None:
        words += ["--scheduler-cls", "vllm_omni_sched.OmniScheduler"]
        words += ["--additional-config", json.dumps({KEY: grouped(system.options)})]
    return words


def quantized_at_start(checkpoint: WeightFormat, served: WeightFormat) -> bool:
    """Return whether vLLM itself makes weights of a format from a checkpoint of another, when it loads them."""
    return (checkpoint, served) == (WeightFormat.BF16, WeightFormat.FP8)


def known_devices() -> tuple[str, ...]:
    """Return the kinds of devices that are tried by default: those with a price."""
    return tuple(name for name in DEVICES if name in PRICES)
