"""Tables of the costs that the simulator knows."""

from dataclasses import fields

from result_tables import plain_table

from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.costs.hardware import CORE_PIXEL_SECONDS, DEVICES, NVDEC_FRAMES
from vllm_omni_sched.sim.costs.models import MODELS
from vllm_omni_sched.sim.costs.roofline import Efficiency

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
    "memory": Source(SourceKind.PUBLISHED, "vLLM's default of --gpu-memory-utilization"),
    "activation_bytes": Source(SourceKind.ASSUMED, "8,192 tokens of activations, the encoder cache, captured graphs"),
    "request_seconds": Source(SourceKind.ASSUMED, "HTTP, JSON, the chat template"),
    "text_token_seconds": Source(SourceKind.ASSUMED, "half a million tokens per second by a fast tokenizer"),
    "answer_seconds": Source(SourceKind.ASSUMED, "sampling back to the host, detokenizing, one event of a stream"),
}


def devices() -> str:
    """Show each kind of device with its peaks."""
    head = (
        "device",
        "memory GB",
        "GB/s",
        "bf16 TFLOP/s",
        "NVDEC",
        "NVLink GB/s",
        "PCIe GB/s",
    )
    return plain_table(
        head,
        (
            (one.name, _number(one.memory_bytes / 1e9), _number(one.bandwidth_bytes_per_second / 1e9),
             _number(one.flops / 1e12),
             f"{one.nvdec_engines} at {one.video_hertz / 1e6:.0f} MHz" if one.nvdec_engines else "–",
             _number(one.nvlink_bytes_per_second / 1e9), _number(one.pcie_bytes_per_second / 1e9))
            for one in DEVICES.values()
        ),
    )  # fmt: skip


def models() -> str:
    """Show each model: what follows from its shape, and what its card says."""
    return plain_table(
        ("model", "parameters, 10⁹", "published", "KV bytes a token", "encodes"),
        (
            (one.name, f"{one.parameters / 1e9:.3f}", f"{one.published_parameters / 1e9:.3f}",
             f"{one.llm.kv_bytes_per_token():,}", ", ".join(one.encodings))
            for one in MODELS.values()
        ),
    )  # fmt: skip


def efficiencies() -> str:
    """Show each option of `Efficiency` with its default."""
    return plain_table(
        ("option", "default", "source"),
        ((f"`{one.name}`", f"{one.default:g}", _of(EFFICIENCY_SOURCES[one.name])) for one in fields(Efficiency)),
    )


def decoders() -> str:
    """Show each decoder: frames of 1920 x 1080 per second, by codec."""
    codecs = ("h264", "hevc", "vp9", "av1")
    pixels = 1920 * 1080
    core = [str(round(1 / (CORE_PIXEL_SECONDS[c] * pixels))) if c in CORE_PIXEL_SECONDS else "–" for c in codecs]
    rows = [("a core", *core)]
    for kind in DEVICES.values():
        if not kind.nvdec_engines:
            continue
        frames, hertz = NVDEC_FRAMES[kind.nvdec]
        rates = [str(round(frames[c] * kind.video_hertz / hertz)) if c in frames else "–" for c in codecs]
        rows.append((f"an NVDEC engine of {kind.name}", *rates))
    return plain_table(("decoder", *codecs), rows)


PARTS = {
    "costs-devices": devices,
    "costs-models": models,
    "costs-efficiencies": efficiencies,
    "costs-decoders": decoders,
}


def _of(source: Source) -> str:
    return f"{source.kind.value}: {source.text}"


def _number(value: float) -> str:
    return f"{value:,.6g}" if value else "–"
