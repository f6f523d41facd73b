"""How long a server of a stage `servers` works on a request."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vllm_omni_sched.stage_options.base import Options


class Deterministic(Options):
    """Always as long."""

    distribution: Literal["deterministic"] = Field(description="Always `mean`.")
    mean: float = Field(gt=0, description="Seconds.")


class Exponential(Options):
    """As in M/M/c."""

    distribution: Literal["exponential"] = Field(description="With `mean`.")
    mean: float = Field(gt=0, description="Seconds.")


class Hyperexponential(Options):
    """Of two exponentials with balanced means: more spread than one."""

    distribution: Literal["hyperexponential"] = Field(
        description="With `mean` and `cv`; of two phases, balanced means."
    )
    mean: float = Field(gt=0, description="Seconds.")
    cv: float = Field(gt=1, description="Standard deviation as a part of the mean, above 1.")


class Steps(Options):
    """Denoising steps over pixels, as a diffusion transformer."""

    distribution: Literal["steps"] = Field(description="Work: denoising `steps` over `pixels`.")
    steps: int = Field(ge=1, description="Denoising steps of a request.")
    pixels: int = Field(ge=1, description="Pixels of what it makes: width × height × frames.")
    seconds_per_step_megapixel: float = Field(gt=0, description="Seconds of a step for 1,000,000 pixels.")
    fixed_seconds: float = Field(0.0, ge=0, description="Seconds besides the steps: text encoding, decoding.")

    @property
    def mean(self) -> float:
        """Seconds of a request."""
        return self.fixed_seconds + self.steps * self.seconds_per_step_megapixel * self.pixels / 1e6


def _number(value: Any) -> Any:
    """A bare number is that long, always."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"distribution": "deterministic", "mean": value}
    return value


Seconds = Annotated[
    Annotated[Deterministic | Exponential | Hyperexponential | Steps, Field(discriminator="distribution")],
    BeforeValidator(_number),
]
"""One of the distributions, by its ``distribution``; a number is `Deterministic`."""
