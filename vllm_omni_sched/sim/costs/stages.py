"""What stages cost that are no engine of vLLM: pictures by diffusion, speech."""

from dataclasses import dataclass
from typing import Protocol

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.costs.hardware import DeviceKind
from vllm_omni_sched.sim.costs.registry import pick
from vllm_omni_sched.sim.work import Request


class StageCosts(Protocol):
    """Seconds of one replica of a stage for one request, alone."""

    source: Source

    def seconds(self, request: Request) -> float:
        """From taking it on until its output is whole."""


@dataclass(frozen=True)
class DiffusionShape:
    """A diffusion transformer: joint attention of 16 x 16 pixels a token, and of ``text_tokens``."""

    name: str
    parameters: float
    layers: int
    hidden: int
    text_tokens: int
    steps: int
    source: Source


DIFFUSION = {
    shape.name: shape
    for shape in (
        DiffusionShape(
            "flux.1-dev", 12e9, 57, 3072, 512, 28,
            Source(SourceKind.PUBLISHED, "config.json of black-forest-labs/FLUX.1-dev; steps as in flux-fast"),
        ),
        DiffusionShape(
            "sd3-medium", 2e9, 24, 1536, 333, 28,
            Source(SourceKind.PUBLISHED, "config.json of stabilityai/stable-diffusion-3-medium; steps as on its card"),
        ),
    )
}  # fmt: skip


class DiffusionCosts:
    """Operations of all denoising steps, at half of the peak (assumed); twice as many with a negative prompt.

    What comes before and after, text encoder and VAE, is taken as a twentieth more (assumed).

    Raises:
        ConfigError: the model is not known, or a size or the number of steps is not positive.
    """

    compute = 0.5
    beside = 1.05

    def __init__(
        self,
        model: str,
        device: DeviceKind,
        width: int = 1024,
        height: int = 1024,
        steps: int = 0,
        guided: bool = False,
    ) -> None:
        shape = pick("diffusion model", model, DIFFUSION)
        steps = steps or shape.steps
        if min(width, height, steps) <= 0:
            raise ConfigError(f"width, height and steps must be above 0, got {width}, {height} and {steps}")
        self.source = Source(SourceKind.ROOFLINE, f"{model} on {device.name}, half of its peak assumed")
        tokens = width * height / 256 + shape.text_tokens
        each = 2 * shape.parameters * tokens + 4 * shape.layers * shape.hidden * tokens**2
        self._seconds = steps * (2 if guided else 1) * each / (device.flops * self.compute) * self.beside

    def seconds(self, request: Request) -> float:
        """One picture."""
        return self._seconds


@dataclass(frozen=True)
class OutputCosts:
    """In proportion to the tokens of the answer, beside a constant."""

    base_seconds: float
    per_output_token: float
    source: Source

    def seconds(self, request: Request) -> float:
        """For the whole answer."""
        return self.base_seconds + self.per_output_token * request.output_tokens


OUTPUT_STAGES = {
    "talker": OutputCosts(
        0.02,
        0.05,
        Source(
            SourceKind.ASSUMED,
            "a token of text is a quarter of a second of speech, 12 codes at 4 ms each; a batch shares the steps",
        ),
    ),
    "vocoder": OutputCosts(
        0.03,
        0.0125,
        Source(SourceKind.ASSUMED, "a twentieth of the length of the speech, a quarter of a second a token"),
    ),
}
