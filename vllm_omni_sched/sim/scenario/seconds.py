"""Define the service times of a stage `servers`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vllm_omni_sched.stage_options.base import Options


class Deterministic(Options):
    """A constant service time."""

    distribution: Literal["deterministic"] = Field(description="Always `mean`.")
    mean: float = Field(gt=0, description="Seconds.")


class Exponential(Options):
    """An exponential service time, as in M/M/c."""

    distribution: Literal["exponential"] = Field(description="With `mean`.")
    mean: float = Field(gt=0, description="Seconds.")


class Hyperexponential(Options):
    """A mix of two exponentials with balanced means, which has more spread than one."""

    distribution: Literal["hyperexponential"] = Field(
        description="With `mean` and `cv`; of two phases, balanced means."
    )
    mean: float = Field(gt=0, description="Seconds.")
    cv: float = Field(gt=1, description="Standard deviation relative to the mean, above 1.")


class Steps(Options):
    """A service time of denoising steps over pixels, as of a diffusion transformer."""

    distribution: Literal["steps"] = Field(description="Work: denoising `steps` over `pixels`.")
    steps: int = Field(ge=1, description="Denoising steps of a request.")
    pixels: int = Field(ge=1, description="Pixels of what it makes: width × height × frames.")
    seconds_per_step_megapixel: float = Field(gt=0, description="Seconds of a step for 1,000,000 pixels.")
    fixed_seconds: float = Field(0.0, ge=0, description="Seconds besides the steps: text encoding, decoding.")

    @property
    def mean(self) -> float:
        """Return the seconds of a request."""
        return self.fixed_seconds + self.steps * self.seconds_per_step_megapixel * self.pixels / 1e6


def _number(value: Any) -> Any:
    """Convert a bare number to a constant service time."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"distribution": "deterministic", "mean": value}
    return value


Seconds = Annotated[
    Annotated[Deterministic | Exponential | Hyperexponential | Steps, Field(discriminator="distribution")],
    BeforeValidator(_number),
]
"""One of the distributions, by its ``distribution``; a number is `Deterministic`."""
