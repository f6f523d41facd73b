"""Tables of the costs that the simulator knows, with their sources."""

from dataclasses import fields

from result_tables import plain_table

from vllm_omni_sched.sim.costs import errors
from vllm_omni_sched.sim.costs.base import Source
from vllm_omni_sched.sim.costs.choice import CORE_PIXEL_SECONDS, NVDEC_FRAMES, NVDEC_SOURCE, CoreDecoder
from vllm_omni_sched.sim.costs.hardware import DEVICES, LINKS
from vllm_omni_sched.sim.costs.models import MODELS
from vllm_omni_sched.sim.costs.roofline import EFFICIENCY_SOURCES, Efficiency
from vllm_omni_sched.sim.plan.systems import PRICE_SOURCES, PRICES


def known_errors() -> str:
    """Show what each source of costs was compared with, and how far it was off."""
    p50, p99 = errors.BACKTEST["P50"], errors.BACKTEST["P99"]
    alone, pipeline = errors.ENGINE_ALONE, errors.PIPELINE
    on = {name: _signs(one.text) for name, one in errors.H200.items()}
    stock, ours = errors.TEXT_WAITS_MILLISECONDS
    return plain_table(
        ("source", "compared with", "error"),
        (
            (
                "calibrated, `--server`",
                "a real vLLM 0.33 server on CPU over HTTP, three traces of two seeds: "
                "[the back-test](fidelity.md#traces-that-no-calibration-has-seen)",
                f"P50: {p50.within} of {p50.number} within {p50.bar} %, the others up to {p50.largest} %; "
                f"P99: {p99.within} of {p99.number} within {p99.bar} %, the others up to {p99.largest} %",
            ),
            (
                "calibrated, engine alone",
                "vLLM 0.30 on CPU, in the client's process: [fidelity](fidelity.md#an-engine-on-two-cores)",
                f"P50 up to {alone['P50']} % (TTFT), P99 up to {alone['P99']} %, all loads together",
            ),
            (
                "calibrated, pipeline",
                "vLLM-Omni 0.30 on CPU: [fidelity](fidelity.md#a-pipeline-on-two-cores)",
                f"P50 up to {pipeline['P50']} %, P99 up to {pipeline['P99']} %, all loads together",
            ),
            (
                "roofline, decoding",
                "published tokens/s of gpt-fast, 7B on 1 to 8 A100",
                f"{_signs(errors.DECODING.text)}; 70B on 8 A100: {_signs(errors.DECODING_70B.text)}",
            ),
            (
                "roofline, long prompts",
                "published times of TensorRT-LLM, 7B on one and 70B on four A100",
                _signs(errors.LONG_PROMPTS.text),
            ),
            ("roofline, prompts of 128 tokens", "the same", _signs(errors.SHORT_PROMPTS.text)),
            (
                "roofline, a load of text and images",
                "a whole vLLM 0.33 on one H200, stock and ours, once: [fidelity](fidelity.md#an-engine-on-an-h200)",
                f"time between tokens: {on['gap P50']} at P50, {on['gap largest']} at the largest; TTFT of text: "
                f"{on['TTFT of text P50']} at P50 ({stock} and {ours} ms of the front end), "
                f"{on['TTFT of text P99']} at P99; TTFT of images: {on['TTFT of images P50']} and "
                f"{on['TTFT of images P99']}",
            ),
            (
                "roofline, encoders",
                "the tower of CLIP in plain torch on an H200",
                "none: `encoder_compute` is set from it",
            ),
            (
                "roofline, experts, MLA, windows, FP8 and 4 bits, pipelines, links between stages",
                "nothing",
                "not known: no measurement backs them; `plan` says so where it uses them",
            ),
            (
                "published peaks, links, NVDEC, image processor",
                "nothing of ours: used as their source gives them",
                "not known on your hardware",
            ),
            ("published sizes of models", "parameter counts of the models' authors", "at most 0.3 %"),
            ("assumed", "nothing", "not known: change them if you know better"),
        ),
    )


def devices() -> str:
    """Show each kind of device with its peaks."""
    head = (
        "device",
        "memory GB",
        "GB/s",
        "bf16 TFLOP/s",
        "fp8 TFLOP/s",
        "SMs",
        "NVDEC",
        "NVLink GB/s",
        "PCIe GB/s",
        "source",
    )
    return plain_table(
        head,
        (
            (one.name, _number(one.memory_bytes / 1e9), _number(one.bandwidth_bytes_per_second / 1e9),
             _number(one.flops / 1e12), _number(one.fp8_flops / 1e12), str(one.sms),
             f"{one.nvdec_engines} at {one.video_hertz / 1e6:.0f} MHz" if one.nvdec_engines else "–",
             _number(one.nvlink_bytes_per_second / 1e9), _number(one.pcie_bytes_per_second / 1e9), _of(one.source))
            for one in DEVICES.values()
        ),
    )  # fmt: skip


def prices() -> str:
    """Show the default price of each device."""
    return plain_table(
        ("device", "$ per hour", "source"),
        ((name, f"{price:.2f}", _of(PRICE_SOURCES[name])) for name, price in PRICES.items()),
    )


def links() -> str:
    """Show each link."""
    return plain_table(
        ("link", "GB/s", "source", "latency µs", "source"),
        (
            (one.name, _number(one.bytes_per_second / 1e9), _of(one.source), _number(one.latency_seconds * 1e6),
             _of(one.latency_source))
            for one in LINKS.values()
        ),
    )  # fmt: skip


def models() -> str:
    """Show each model: what follows from its shape, and what its card says."""
    return plain_table(
        ("model", "parameters, 10⁹", "published", "KV bytes a token", "encodes", "source"),
        (
            (one.name, f"{one.parameters / 1e9:.3f}", f"{one.published_parameters / 1e9:.3f}",
             f"{one.llm.kv_bytes_per_token():,}", ", ".join(one.encodings), _of(one.source))
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
    rows = [("a core", *core, _of(CoreDecoder.source))]
    for kind in DEVICES.values():
        if not kind.nvdec_engines:
            continue
        frames, hertz = NVDEC_FRAMES[kind.nvdec]
        rates = [str(round(frames[c] * kind.video_hertz / hertz)) if c in frames else "–" for c in codecs]
        rows.append((f"an NVDEC engine of {kind.name}", *rates, f"published: {NVDEC_SOURCE}"))
    return plain_table(("decoder", *codecs, "source"), rows)


PARTS = {
    "costs-errors": known_errors,
    "costs-devices": devices,
    "costs-links": links,
    "costs-models": models,
    "costs-efficiencies": efficiencies,
    "costs-decoders": decoders,
    "plan-prices": prices,
}


def _of(source: Source) -> str:
    return f"{source.kind.value}: {source.text}"


def _signs(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")


def _number(value: float) -> str:
    return f"{value:,.6g}" if value else "–"
