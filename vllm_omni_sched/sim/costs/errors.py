"""State how far costs are known to be off: one source for the page of `plan` and for the documents.

`tests/unit/sim/costs/test_errors.py` computes each number again, from the newest result files and published times.
After a new back-test, correct `BACKTEST` here and run ``docs/generate.py``.
"""

from typing import NamedTuple

from vllm_omni_sched.sim.costs.configured.decoder import ConfiguredLlm
from vllm_omni_sched.sim.costs.models import ModelShape, Precision, WeightFormat
from vllm_omni_sched.sim.costs.roofline import Parallel


class Met(NamedTuple):
    """Counts the values of a back-test that are within a bar.

    ``number``: of all values; ``within``: of those whose error is at most the ``bar``; ``largest``: error of all. The
    bar and errors are in percent.
    """

    within: int
    number: int
    bar: int
    largest: int


class Range(NamedTuple):
    """Holds the least and the largest error of comparisons, in percent: above 0 where the prediction is too large."""

    low: int
    high: int

    @property
    def text(self) -> str:
        """Return both errors with their signs, or the one that they share."""
        return f"{self.low:+d} %" if self.low == self.high else f"{self.low:+d} to {self.high:+d} %"


BACKTEST = {"P50": Met(31, 36, 10, 22), "P99": Met(32, 36, 20, 27)}
"""Costs of `calibrate --server` against a real server over HTTP on two CPU cores: all back-tests of costs of this kind,
which are those with a factor under load.
"""
ENGINE_ALONE = {"P50": 22, "P99": 24}
"""Largest error of costs of an engine in its client's process on two CPU cores, all loads together, in percent."""
PIPELINE = {"P50": 12, "P99": 37}
"""Largest error of costs of a pipeline of vLLM-Omni on two CPU cores, all loads together, in percent."""
DECODING = Range(-2, 3)
"""Tokens a second of Llama-2-7B alone on 1 to 8 A100, against gpt-fast."""
DECODING_70B = Range(21, 21)
"""LLaMA-2-70B alone on 8 A100, against gpt-fast."""
LONG_PROMPTS = Range(9, 12)
"""Prompts of 2,048 tokens, 7B on one and 70B on four A100, against TensorRT-LLM."""
SHORT_PROMPTS = Range(-41, -35)
"""Prompts of 128 tokens, the same."""
H200 = {
    "gap P50": Range(-2, 3),
    "gap largest": Range(-9, 61),
    "TTFT of text P50": Range(-79, -75),
    "TTFT of text P99": Range(-35, 74),
    "TTFT of images P50": Range(-15, 96),
    "TTFT of images P99": Range(-4, 23),
}
"""A load of text and images on one H200, stock and ours, against the roofline alone."""
TEXT_WAITS_MILLISECONDS = (32, 38)
"""What text waited longer for its first token there than predicted, at P50, for stock and for ours."""


def served_error() -> str:
    """Return what is known of costs that `calibrate --server` measured, as sentences."""
    told = " and ".join(
        f"{one.within} of {one.number} values at {name} within {one.bar} % (all within {one.largest} %)"
        for name, one in BACKTEST.items()
    )
    return (
        f"Costs are measured on your engine behind its server. On two CPU cores, such costs predicted {told}; they "
        "were never compared on a GPU."
    )


def engine_error() -> str:
    """Return what is known of costs that `calibrate` measured on an engine alone, as sentences."""
    return (
        "Costs are measured on your engine alone, in its client's process. On two CPU cores, such costs were off by up "
        f"to {ENGINE_ALONE['P50']} % at P50 and {ENGINE_ALONE['P99']} % at P99; they were never compared with a server "
        "over HTTP, which `calibrate --server` measures, nor on a GPU."
    )


def roofline_error() -> str:
    """Return what is known of the roofline, as sentences."""
    on = {name: one.text for name, one in H200.items()}
    return (
        "Costs are by the roofline. Against published ones of Llama on A100, tokens a second are off by "
        f"{DECODING.text}, of 70B on 8 devices by {DECODING_70B.text}, times of long prompts by {LONG_PROMPTS.text}, "
        f"of prompts of 128 tokens by {SHORT_PROMPTS.text}. Against one load on one H200, gaps are off by "
        f"{on['gap P50']} at P50 and by {on['gap largest']} at the largest, TTFT of text by "
        f"{on['TTFT of text P50']} at P50 and by {on['TTFT of text P99']} at P99, TTFT of images by "
        f"{on['TTFT of images P50']} and by {on['TTFT of images P99']}. No other device was compared."
    )


def not_known(shape: ModelShape, precision: Precision, split: Parallel) -> tuple[str, ...]:
    """Return what the roofline counts on for this model, and no measurement backs."""
    llm = shape.llm
    configured = llm if isinstance(llm, ConfiguredLlm) else None
    found = {
        "routed experts": bool(llm.expert_parameters),
        "latent attention (MLA)": configured is not None and configured.latent is not None,
        "sliding windows": configured is not None and bool(configured.sliding_layers),
        f"{precision.weights.value} weights": precision.weights is not WeightFormat.BF16,
        "an FP8 KV cache": precision.kv_fp8,
        "a pipeline": split.pipeline > 1,
    }
    return tuple(name for name, has in found.items() if has)


def error_of(shape: ModelShape | None, precision: Precision, split: Parallel, served: bool = False) -> str:
    """Return how far the costs of a plan are known to be off.

    Args:
        shape: of the model; None: the costs were calibrated.
        served: whether they were calibrated behind a server.
    """
    if shape is None:
        return served_error() if served else engine_error()
    if missing := not_known(shape, precision, split):
        return f"{roofline_error()} This plan has {', '.join(missing)}: how far costs of these are off is not known."
    return roofline_error()
