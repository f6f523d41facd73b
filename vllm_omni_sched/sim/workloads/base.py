"""Define the interface of workloads: options, a mean rate, a source, and a stream of arrivals."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_sched.sim.work import Item, Request


class Arrival(NamedTuple):
    """A request without its number; fields as in `Request`."""

    at: float
    text_tokens: int
    output_tokens: int
    items: tuple[Item, ...] = ()
    sla: str = "interactive"
    client: int = 0


class Workload(Protocol):
    """Generates arrivals. It keeps no state: each stream begins at time 0."""

    @property
    def source(self) -> str:
        """Return the source of its statistics, and which are assumed; for results."""

    @property
    def rate(self) -> float:
        """Return the mean requests per second."""

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield all arrivals in order of time, made on demand; without end unless the workload says otherwise."""


class WorkloadOptions(BaseModel):
    """Options that every kind has. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rate: float = Field(gt=0, allow_inf_nan=False, description="Mean requests per second.")


class ServedOptions(WorkloadOptions):
    """Options of kinds that do not fix the class of their requests."""

    sla: str = Field("interactive", min_length=1, description="The class of its requests.")


def requests(workload: Workload, seed: int) -> Iterator[Request]:
    """Yield the requests of a workload; the same for the same seed.

    Kinds draw times and contents from separate generators: another rate gives the same requests, at other times.

    Raises:
        ValueError: the seed is negative.
    """
    for number, arrival in enumerate(workload.arrivals(np.random.default_rng(seed))):
        at, text_tokens, output_tokens, items, sla, client = arrival
        yield Request(number, at, text_tokens, output_tokens, items, sla, client)
