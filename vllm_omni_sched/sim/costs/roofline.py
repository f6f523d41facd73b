"""Compute an engine's seconds from the shape of its model and the peaks of its device.

A step takes as long as its operations, or as reading the weights and the KV cache, whichever is longer (Williams,
Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 2009). `Efficiency` has the fractions
of the peaks that work reaches, and the fixed costs of a step, each with its source.
"""

import math
from dataclasses import dataclass, fields

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.costs.hardware import DeviceKind, all_reduce_factor
from vllm_omni_sched.sim.costs.models import BF16_BYTES, ModelShape, Precision, WeightFormat
from vllm_omni_sched.sim.work import Request


@dataclass(frozen=True)
class Parallel:
    """Devices that run one replica together.

    ``tensor``: devices between which each layer is split. ``pipeline``: groups of them, each with a part of the layers.
    ``experts``: routed experts are whole on a device, not split (vLLM's ``--enable-expert-parallel``).
    """

    tensor: int = 1
    pipeline: int = 1
    experts: bool = False

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class Efficiency:
    """Fractions of peaks, in (0, 1], and fixed costs.

    ``compute``, ``bandwidth``: fractions that the LLM reaches. ``encoder_compute``: fraction that a tower reaches.
    ``saturating_share``: the fraction of the streaming multiprocessors that suffices for the full bandwidth.
    ``lane_share``: the largest fraction of the multiprocessors that a lane gets while steps run beside it.
    ``step_seconds``, ``encode_seconds``: launches and scheduling, for each step and each batch of encodes.
    ``all_reduce_seconds``: to begin one; each layer has two under tensor parallelism.
    ``expert_imbalance``: work of the device with the most, relative to the mean, where experts are not split.
    ``hop_seconds``: to begin a transfer between two stages of a pipeline.
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
    expert_imbalance: float = 1.25
    hop_seconds: float = 30e-6
    memory: float = 0.9
    activation_bytes: float = 3e9
    request_seconds: float = 1e-3
    text_token_seconds: float = 2e-6
    answer_seconds: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("compute", "bandwidth", "encoder_compute", "saturating_share", "lane_share", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"efficiency {name!r} must be above 0 and at most 1, got {getattr(self, name)}")
        if self.expert_imbalance < 1:
            raise ConfigError(f"efficiency 'expert_imbalance' must be 1 or more, got {self.expert_imbalance}")
        for one in fields(self):
            if not 0 <= getattr(self, one.name) < math.inf:
                raise ConfigError(
                    f"efficiency {one.name!r} must be finite and 0 or more, got {getattr(self, one.name)}"
                )


EFFICIENCY_SOURCES = {
    "compute": Source(
        SourceKind.PUBLISHED,
        "Bullet (ASPLOS 2026), figure 5a: Llama-3.1-8B on an A100 in chunks of 1,024 tokens gets 71 to 61 %",
    ),
    "bandwidth": Source(
        SourceKind.PUBLISHED, "gpt-fast, README: an A100 80 GB of 2,039 GB/s peaks at about 1,700 GB/s in practice"
    ),
    "encoder_compute": Source(
        SourceKind.MEASURED,
        "0.41 on an H200: 1,056 images a second by ViT-L/14 at 336 pixels, 8 at a time (benchmarks.gpu.lanes)",
    ),
    "saturating_share": Source(
        SourceKind.PUBLISHED,
        "Bullet (ASPLOS 2026), section 3.2.2 and figure 8: 30 of the 108 multiprocessors of an A100 saturate its "
        "memory; taken for other devices too",
    ),
    "lane_share": Source(
        SourceKind.ASSUMED,
        "two streams that could each fill the device have half of it each; that the lane's has the lower priority is "
        "not counted. An H200 gave a lane 0.68 of the images that it encodes alone, and decoding beside it 0.46 of its "
        "own speed (benchmarks.gpu.lanes, share 1)",
    ),
    "step_seconds": Source(
        SourceKind.PUBLISHED,
        "gpt-fast, README: Llama-2-7B takes 9.5 ms for a token on an A100; without the reading of the weights",
    ),
    "encode_seconds": Source(SourceKind.ASSUMED, "about 400 kernel launches of 7 us, and the copy of the pixels"),
    "all_reduce_seconds": Source(
        SourceKind.PUBLISHED, "fitted to gpt-fast's tokens per second of Llama-2-7B on 2, 4 and 8 A100 with NVLink"
    ),
    "expert_imbalance": Source(
        SourceKind.ASSUMED, "without balancing, the busiest of 8 devices has a quarter more than the mean"
    ),
    "hop_seconds": Source(SourceKind.ASSUMED, "a message between two devices, and the wake-up of its receiver"),
    "memory": Source(SourceKind.PUBLISHED, "vLLM's default of --gpu-memory-utilization"),
    "activation_bytes": Source(SourceKind.ASSUMED, "8,192 tokens of activations, the encoder cache, captured graphs"),
    "request_seconds": Source(SourceKind.ASSUMED, "HTTP, JSON, the chat template"),
    "text_token_seconds": Source(SourceKind.ASSUMED, "half a million tokens per second by a fast tokenizer"),
    "answer_seconds": Source(SourceKind.ASSUMED, "sampling back to the host, detokenizing, one event of a stream"),
}


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
    8. A token goes through some of the routed experts. A step of n tokens reads an expert unless all of them miss it;
       tokens are taken to choose evenly and independently. With expert parallelism the busiest device has
       ``expert_imbalance`` times the mean of the experts' work and weights.
    9. With p stages of a pipeline, p steps are in flight, each with a p-th of the tokens. One goes through all layers,
       so a request gets a token in the time of a step of that size, and a hop for each further stage.
    10. FP8 weights run at the device's FP8 peak if it has one; integers and 4-bit weights, and FP8 without such a peak,
        are converted and run at that of bf16. Attention is in bf16.

    Args:
        parallel: the devices of a replica; a number is ``tensor`` alone.
        precision: of weights and KV cache; default: that of the model's checkpoint.
        queries: tokens that a step computes for a decoding request: more than 1 if it verifies draft tokens. Each goes
            through the layers and the output matrix; the KV cache is read once for all.

    Raises:
        ConfigError: the devices do not divide heads, layers or experts, or model and KV cache do not fit; the message
            names the missing memory, and the fix.
    """

    def __init__(
        self,
        model: ModelShape,
        device: DeviceKind,
        parallel: int | Parallel = 1,
        efficiency: Efficiency | None = None,
        precision: Precision | None = None,
        queries: int = 1,
    ) -> None:
        use = efficiency or Efficiency()
        llm = model.llm
        split = parallel if isinstance(parallel, Parallel) else Parallel(parallel)
        tensor_parallel, stages = split.tensor, split.pipeline
        form = precision or model.precision
        if tensor_parallel < 1 or llm.heads % tensor_parallel:
            raise ConfigError(
                f"model {model.name!r} cannot be split between {tensor_parallel} devices: their number has to divide "
                f"its {llm.heads} heads"
            )
        if stages < 1 or stages > llm.layers:
            raise ConfigError(
                f"model {model.name!r} cannot have {stages} stages of a pipeline: it has {llm.layers} layers"
            )
        if split.experts and not llm.expert_parameters:
            raise ConfigError(f"model {model.name!r} has no routed experts: remove expert parallelism")
        self.source = Source(SourceKind.ROOFLINE, _described(model, device, split, form))
        self.model, self.device, self.tensor_parallel, self.efficiency = model, device, tensor_parallel, use
        self.parallel, self.precision = split, form
        self.kv_tokens = _kv_tokens(model, device, split, use, form)
        peak = device.fp8_flops if form.weights is WeightFormat.FP8 and device.fp8_flops else device.flops
        attention = device.flops * use.compute * tensor_parallel
        operations = peak * use.compute * tensor_parallel
        reading = device.bandwidth_bytes_per_second * use.bandwidth * tensor_parallel
        each = form.weights.bytes_each
        uneven = use.expert_imbalance if split.experts and tensor_parallel > 1 else 1.0
        active = llm.expert_parameters * llm.expert_share
        self._token = 2 * (llm.layer_parameters + (uneven - 1.0) * active) / operations
        self._queries = queries
        self._head = 2 * llm.head_parameters * queries / attention
        self._pair, self._read = llm.operations_per_pair / attention, llm.operations_per_read * queries
        dense = llm.stored_parameters - llm.expert_parameters
        self._weights = (form.weights.dense_bytes_each * dense + BF16_BYTES * llm.head_parameters) / reading
        self._experts = each * llm.expert_parameters * uneven / reading
        self._missed = 1.0 - llm.expert_share
        self._context = form.kv_bytes * llm.kv_numbers_per_token(tensor_parallel) / reading
        self._saturating, self._fair = use.saturating_share, use.lane_share
        self._step, self._token_link = use.step_seconds, 0.0
        link = device.nvlink_bytes_per_second or device.pcie_bytes_per_second
        if tensor_parallel > 1:
            reduces = 2 * llm.layers
            self._step += reduces * use.all_reduce_seconds
            self._token_link = reduces * all_reduce_factor(tensor_parallel) * BF16_BYTES * llm.hidden / link
        self._part = 1.0 / stages
        if stages > 1:
            self._step += (stages - 1) * use.hop_seconds
            self._token_link += (stages - 1) * BF16_BYTES * llm.hidden / device.pcie_bytes_per_second
        encoding = device.flops * use.encoder_compute * tensor_parallel
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
        part = self._part
        if part != 1.0:  # of each step in flight; a request is in one of them
            decodes_each = max(1.0, decodes * part) if decodes else 0.0
            context = context_tokens * decodes_each / decodes if decodes else 0.0
            return self._seconds(decodes_each, context, prefill_tokens * part, prefill_pairs * part, share)
        return self._seconds(decodes, context_tokens, prefill_tokens, prefill_pairs, share)

    def _seconds(
        self, decodes: float, context_tokens: float, prefill_tokens: float, prefill_pairs: float, share: float
    ) -> float:
        tokens = decodes * self._queries + prefill_tokens
        pairs = prefill_pairs + self._read * context_tokens
        compute = self._token * tokens + self._head * decodes + self._pair * pairs
        memory = self._read_weights(tokens) + self._context * context_tokens
        if share != 1.0:
            compute /= share
            if share < self._saturating:
                memory *= self._saturating / share
        return (compute if compute > memory else memory) + self._step + self._token_link * tokens

    def _read_weights(self, tokens: float) -> float:
        """Return the seconds to read the weights that so many tokens need (rule 8)."""
        if not self._experts:
            return self._weights
        return self._weights + self._experts * (1.0 - math.pow(self._missed, tokens))

    def operations_seconds(self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float) -> float:
        """Return the seconds of the operations by rule 1, on all devices together."""
        tokens = decodes * self._queries + prefill_tokens
        pairs = prefill_pairs + self._read * context_tokens
        return (self._token * tokens + self._head * decodes + self._pair * pairs) * self._part

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


def _described(model: ModelShape, device: DeviceKind, split: Parallel, form: Precision) -> str:
    """Return the model and its devices in words."""
    devices = f"{split.tensor} x {device.name}" if split.pipeline == 1 else (
        f"{split.pipeline} stages of {split.tensor} x {device.name}"
    )  # fmt: skip
    notes = ["whole experts"] if split.experts else []
    notes += [form.weights.value] if form.weights is not WeightFormat.BF16 else []
    notes += ["fp8 KV cache"] if form.kv_fp8 else []
    return f"{model.name} on {devices}" + "".join(f", {note}" for note in notes)


def _kv_tokens(model: ModelShape, device: DeviceKind, split: Parallel, use: Efficiency, form: Precision) -> int:
    """Return the tokens of KV cache that fit beside the weights.

    Raises:
        ConfigError: the weights do not fit, or leave no room for one token.
    """
    each = device.memory_bytes * use.memory - use.activation_bytes
    weights = model.weight_bytes(form.weights)
    kv_bytes = form.kv_bytes * model.llm.kv_numbers_per_token(split.tensor)
    tokens = int((split.devices * each - weights) // kv_bytes)
    if tokens > 0:
        return tokens
    missing = weights + kv_bytes - split.devices * each
    enough = [n for n in range(1, model.llm.heads + 1) if model.llm.heads % n == 0 and n * each > weights]
    more = f"use {enough[0]} devices, " if enough else "use "
    raise ConfigError(
        f"model {model.name!r} does not fit on {split.devices} x {device.name!r}: {missing:,.0f} bytes are missing "
        f"for weights of {weights:,} bytes, activations of {use.activation_bytes:,.0f} bytes on each device "
        f"and one token of KV cache; {more}a larger device or a smaller model"
    )
