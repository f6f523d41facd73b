"""Compute an engine's seconds from the shape of its model and the peaks of its device.

A step takes as long as its operations, or as reading the weights and the KV cache, whichever is longer (Williams,
Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 2009). `Efficiency` has the fractions
of the peaks that work reaches, and the fixed costs of a step.
"""

import math
from dataclasses import dataclass, fields
from pathlib import Path

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.base import EngineCosts, Source, SourceKind
from vllm_omni_sched.sim.costs.hardware import DeviceKind, all_reduce_factor, device
from vllm_omni_sched.sim.costs.measured import MeasuredCosts
from vllm_omni_sched.sim.costs.models import BF16_BYTES, ModelShape, model
from vllm_omni_sched.sim.work import Request


@dataclass(frozen=True)
class Efficiency:
    """Fractions of peaks, in (0, 1], and fixed costs; `docs/simulator/costs.md` has the source of each.

    ``compute``, ``bandwidth``: fractions that the LLM reaches. ``encoder_compute``: fraction that a tower reaches.
    ``saturating_share``: the fraction of the streaming multiprocessors that suffices for the full bandwidth.
    ``lane_share``: the largest fraction of the multiprocessors that a lane gets while steps run beside it.
    ``step_seconds``, ``encode_seconds``: launches and scheduling, for each step and each batch of encodes.
    ``all_reduce_seconds``: to begin one; each layer has two under tensor parallelism.
    ``memory``: the fraction of the device's memory that the engine takes (``gpu_memory_utilization``).
    ``activation_bytes``: of that, on each device, for everything but weights and KV.
    ``request_seconds``, ``text_token_seconds``: of the front end. ``answer_seconds``: until the client has a token.

    Raises:
        ConfigError: a number is out of its range; the message names it.
    """

    compute: float = 0.6
    bandwidth: float = 0.8
    encoder_compute: float = 0.4
    saturating_share: float = 30 / 108
    lane_share: float = 0.5
    step_seconds: float = 1.5e-3
    encode_seconds: float = 3e-3
    all_reduce_seconds: float = 7e-6
    memory: float = 0.9
    activation_bytes: float = 3e9
    request_seconds: float = 1e-3
    text_token_seconds: float = 2e-6
    answer_seconds: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("compute", "bandwidth", "encoder_compute", "saturating_share", "lane_share", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"efficiency {name!r} must be above 0 and at most 1, got {getattr(self, name)}")
        for one in fields(self):
            if not 0 <= getattr(self, one.name) < math.inf:
                raise ConfigError(
                    f"efficiency {one.name!r} must be finite and 0 or more, got {getattr(self, one.name)}"
                )


class RooflineCosts:
    """Costs of an engine by the roofline model.

    1. Operations: 2 for each parameter of the layers and token, 2 for each of the output matrix and decoding
       request, and attention by pairs of a query and a key; at ``compute`` of the peak.
    2. Memory: all weights of the LLM once, and the KV cache of decoding requests; at ``bandwidth`` of the peak.
    3. A step is the longer of the two, plus a constant, plus two all-reduces for each layer under tensor parallelism.
    4. With a share of the multiprocessors, operations take 1 / share as long. Reading does not take longer until the
       share is below ``saturating_share``; from there on it slows down in proportion as well (Lin et al., "Bullet",
       ASPLOS 2026, equation 1).
    5. Encoding is operations alone: it reads each weight once for thousands of patches. So what it takes from an LLM
       beside it is multiprocessors, and bandwidth only by rule 4.
    6. A tower is split between the devices like the LLM.
    7. A lane and steps beside it are streams of one device. The lane has its share, but at most ``lane_share``, however
       little it pauses; the steps have the rest.

    Args:
        devices: those of a replica, between which each layer is split.

    Raises:
        ConfigError: the devices do not divide the heads, or model and KV cache do not fit; the message
            names the missing memory, and the fix.
    """

    def __init__(
        self, model: ModelShape, device: DeviceKind, devices: int = 1, efficiency: Efficiency | None = None
    ) -> None:
        use = efficiency or Efficiency()
        llm = model.llm
        if devices < 1 or llm.heads % devices:
            raise ConfigError(
                f"model {model.name!r} cannot be split between {devices} devices: their number has to divide its "
                f"{llm.heads} heads"
            )
        self.source = Source(SourceKind.ROOFLINE, f"{model.name} on {devices} x {device.name}")
        self.model, self.efficiency = model, use
        self.kv_tokens = _kv_tokens(model, device, devices, use)
        operations = device.flops * use.compute * devices
        reading = device.bandwidth_bytes_per_second * use.bandwidth * devices
        self._token = 2 * llm.layer_parameters / operations
        self._head = 2 * llm.head_parameters / operations
        self._pair = llm.operations_per_pair / operations
        self._weights = BF16_BYTES * (llm.layer_parameters + llm.head_parameters) / reading
        self._context = llm.kv_bytes_per_token(devices) / reading
        self._saturating, self._fair = use.saturating_share, use.lane_share
        self._step, self._token_link = use.step_seconds, 0.0
        if devices > 1:
            link = device.nvlink_bytes_per_second or device.pcie_bytes_per_second
            reduces = 2 * llm.layers
            self._step += reduces * use.all_reduce_seconds
            self._token_link = reduces * all_reduce_factor(devices) * BF16_BYTES * llm.hidden / link
        encoding = device.flops * use.encoder_compute * devices
        self._encode = use.encode_seconds
        self._towers = {
            modality: (one.tower.operations_per_embed / encoding, one.tower.operations_per_pair / encoding,
                       one.sequence_embeds)
            for modality, one in model.encodings.items()
        }  # fmt: skip
        self._prepare = {modality: one.frontend_seconds_per_embed for modality, one in model.encodings.items()}

    def step_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float, share: float = 1.0
    ) -> float:
        """Return the seconds of a step of the LLM; 0 if it has no token to compute."""
        tokens = decodes + prefill_tokens
        if not tokens:
            return 0.0
        compute = self._token * tokens + self._head * decodes + self._pair * (prefill_pairs + context_tokens)
        memory = self._weights + self._context * context_tokens
        if share != 1.0:
            compute /= share
            if share < self._saturating:
                memory *= self._saturating / share
        return (compute if compute > memory else memory) + self._step + self._token_link * tokens

    def operations_seconds(self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float) -> float:
        """Return the seconds of the operations by rule 1, on all devices together."""
        pairs = prefill_pairs + context_tokens
        return self._token * (decodes + prefill_tokens) + self._head * decodes + self._pair * pairs

    def encode_seconds(self, modality: str, embeds: int, items: int = 1, share: float = 1.0) -> float:
        """Return the seconds to encode so many items of one length together.

        Raises:
            ConfigError: the model has no tower for that modality.
        """
        linear, pair, sequence = self._of(modality)
        seen = embeds / items
        if sequence is not None and sequence < seen:
            seen = float(sequence)
        return embeds * (linear + pair * seen) / share + self._encode

    def lane_seconds(
        self, modality: str, embeds: int, items: int = 1, share: float = 1.0, beside: bool = False
    ) -> float:
        """Return the seconds in the lane: alone it has ``share``, beside steps at most ``lane_share`` (rule 7)."""
        return self.encode_seconds(modality, embeds, items, min(share, self._fair) if beside else share)

    def in_lane(self, share: float) -> float:
        """Return the fraction that the lane leaves to the LLM."""
        return 1.0 - min(share, self._fair)

    def frontend_seconds(self, request: Request) -> float:
        """Return the seconds on one core to tokenize, and to decode, resize and normalise the items.

        Raises:
            ConfigError: the model has no tower for the modality of an item.
        """
        use = self.efficiency
        seconds = use.request_seconds + use.text_token_seconds * request.text_tokens
        for item in request.items:
            self._of(item.modality)
            seconds += self._prepare[item.modality] * item.embeds
        return seconds

    @property
    def answer_seconds(self) -> float:
        return self.efficiency.answer_seconds

    def _of(self, modality: str) -> tuple[float, float, int | None]:
        tower = self._towers.get(modality)
        if tower is None:
            known = f"encoders for {', '.join(sorted(self._towers))}" if self._towers else "none, and takes text alone"
            raise ConfigError(
                f"model {self.model.name!r} has no encoder for modality {modality!r}: it has {known}; choose a model "
                "that has one, or a workload without such items"
            )
        return tower


def _kv_tokens(model: ModelShape, device: DeviceKind, devices: int, use: Efficiency) -> int:
    """Return the tokens of KV cache that fit beside the weights.

    Raises:
        ConfigError: the weights do not fit, or leave no room for one token.
    """
    each = device.memory_bytes * use.memory - use.activation_bytes
    weights, kv_bytes = model.weight_bytes, model.llm.kv_bytes_per_token(devices)
    tokens = int((devices * each - weights) // kv_bytes)
    if tokens > 0:
        return tokens
    missing = weights + kv_bytes - devices * each
    enough = [n for n in range(1, model.llm.heads + 1) if model.llm.heads % n == 0 and n * each > weights]
    more = f"use {enough[0]} devices, " if enough else "use "
    raise ConfigError(
        f"model {model.name!r} does not fit on {devices} x {device.name!r}: {missing:,.0f} bytes are missing "
        f"for weights of {weights:,} bytes, activations of {use.activation_bytes:,.0f} bytes on each device "
        f"and one token of KV cache; {more}a larger device or a smaller model"
    )


def engine_costs(
    stage: str,
    device_name: str,
    model_name: str | None = None,
    calibration: Path | None = None,
    devices: int = 1,
    efficiency: Efficiency | None = None,
) -> EngineCosts:
    """Return the costs of an engine: measured if there is a calibration, else by its roofline.

    Raises:
        ConfigError: a name is unknown, the file is no calibration, or the model does not fit; the message names the
            stage.
    """
    try:
        if calibration is not None:
            return MeasuredCosts.read(calibration)
        return RooflineCosts(model(model_name or ""), device(device_name), devices, efficiency)
    except ConfigError as error:
        raise ConfigError(f"stage {stage!r}: {error}") from None
