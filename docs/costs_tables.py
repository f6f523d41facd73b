"""Tables of the costs that the simulator knows."""

from dataclasses import fields

from result_tables import plain_table

from vllm_omni_sched.sim.costs.base import Source
from vllm_omni_sched.sim.costs.hardware import CORE_PIXEL_SECONDS, DEVICES, NVDEC_FRAMES
from vllm_omni_sched.sim.costs.models import MODELS
from vllm_omni_sched.sim.costs.roofline import EFFICIENCY_SOURCES, Efficiency


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
