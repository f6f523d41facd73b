"""Generate arrivals and service of queueing theory, to compare a simulation with closed forms."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from vllm_omni_sched.sim.workloads.base import Arrival, ServedOptions
from vllm_omni_sched.sim.workloads.draws import endless
from vllm_omni_sched.sim.workloads.times import gamma_times


class PoissonOptions(ServedOptions):
    """Options of ``poisson``."""

    service: Literal["deterministic", "exponential", "hyperexponential"] = Field(
        "exponential", description="Distribution of output tokens."
    )
    output_tokens: int = Field(1000, ge=1, description="Mean output tokens.")
    service_cv: float = Field(2.0, gt=1, le=20, description="Coefficient of variation of a hyperexponential service.")
    arrival_cv: float = Field(
        1.0, ge=0, le=20, description="Coefficient of variation of Gamma gaps; 1: Poisson, 0: evenly spaced."
    )
    text_tokens: int = Field(0, ge=0, description="Prompt tokens; 0: service is output alone.")

    @model_validator(mode="after")
    def _both_sorts_have_tokens(self) -> "PoissonOptions":
        if self.service == "hyperexponential" and self.output_tokens <= 2 * _more_often(self.service_cv):
            least = math.floor(2 * _more_often(self.service_cv)) + 1
            raise ValueError(
                f"option 'output_tokens' must be {least} or more for such a service, got {self.output_tokens}"
            )
        return self


class Poisson:
    """Poisson arrivals of requests with output tokens only.

    1. ``deterministic``: all have the mean. ``exponential``: geometric from 1, which is exponential up to a token.
    2. ``hyperexponential``: one of two geometric sorts, each with half of all tokens ("balanced means"), so
       that the coefficient of variation is ``service_cv``, up to a token.

    Source: Kleinrock, Queueing Systems I, 1975; balanced means: Allen, Probability, Statistics and Queueing Theory,
    1990.
    """

    thinnable = True
    source = "Poisson arrivals (or Gamma gaps), output tokens of a textbook's distribution; nothing is measured"

    def __init__(self, options: PoissonOptions) -> None:
        self.rate = options.rate
        self._options = options

    def arrivals(self, random: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        options = self._options
        times, service = random.spawn(2)
        outputs = endless(lambda n: self._outputs(service, n))
        for at in gamma_times(times, options.rate, options.arrival_cv):
            yield Arrival(at, options.text_tokens, next(outputs), (), options.sla)

    def _outputs(self, random: np.random.Generator, number: int) -> Any:
        mean = self._options.output_tokens
        if self._options.service == "deterministic":
            return np.full(number, mean)
        if self._options.service == "exponential":
            return random.geometric(1 / mean, number)
        part = _more_often(self._options.service_cv)
        parts = np.where(random.random(number) < part, part, 1 - part)
        return random.geometric(np.minimum(1.0, 2 * parts / mean))


def _more_often(cv: float) -> float:
    """Return the probability of the shorter of two sorts with balanced means."""
    return (1 + math.sqrt((cv**2 - 1) / (cv**2 + 1))) / 2
