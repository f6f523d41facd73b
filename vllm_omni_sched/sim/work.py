"""Define requests with their multimodal items, and the interface of a simulated replica that serves them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_INF = math.inf


class Clip(NamedTuple):
    """A video file, with the facts that decoding costs depend on. ``wanted`` frames go to the model, evenly spaced."""

    seconds: float
    fps: float
    width: int
    height: int
    gop_frames: int
    wanted: int
    codec: str = "h264"


class Item(NamedTuple):
    """One multimodal item of a prompt.

    ``embeds``: encoder embeddings, equal to its prompt tokens (``num_encoder_embeds``). ``content``: equal for
    equal content, like ``mm_hash``. ``clip``: for a video, the file to decode first.
    """

    modality: str
    embeds: int
    content: int
    clip: Clip | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload.

    ``number``: from 0, in order of arrival. ``arrival``: seconds since the start. ``text_tokens``: of the prompt,
    besides its items, which come before the text. ``sla``: the name of its class. ``client``: id of the sender.
    ``priority``: as in vLLM, lower is earlier.

    Raises:
        ValueError: a number is out of its range.
    """

    number: int
    arrival: float
    text_tokens: int
    output_tokens: int
    items: tuple[Item, ...] = ()
    sla: str = "interactive"
    client: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.arrival < _INF:
            raise ValueError(f"request {self.number}: arrival must be finite and >= 0, got {self.arrival}")
        if self.text_tokens < 0 or self.output_tokens < 1:
            raise ValueError(f"request {self.number}: text_tokens must be 0 or more and output_tokens 1 or more")

    @property
    def prompt_tokens(self) -> int:
        """Return the number of prompt tokens, items included."""
        return self.text_tokens + sum([item.embeds for item in self.items])

    @property
    def modality(self) -> str:
        """Return the modality of its first item; ``text`` without one."""
        return self.items[0].modality if self.items else "text"

    @property
    def name(self) -> str:
        """Return the name in the form of a request id."""
        return str(self.number)


class Job:
    """A request in one stage. The server sets the attributes below the line.

    ``cost_seconds``: estimated time in this stage; ``attempt``: the number of its dispatch.
    """

    __slots__ = ("attempt", "cost_seconds", "first", "largest_gap", "replica", "request", "stage", "submitted")

    def __init__(self, request: Request, stage: int, cost_seconds: float = 0.0, attempt: int = 1) -> None:
        self.request = request
        self.stage = stage
        self.cost_seconds = cost_seconds
        self.attempt = attempt
        self.replica = -1
        self.submitted = 0.0
        # ----
        self.first = float("inf")  # time of the client's first output of this stage
        self.largest_gap = 0.0  # between two of its outputs, seconds


Done = Callable[[Job], None]

BESIDE = frozenset({"lane"})
"""Kinds of work whose seconds overlap with other kinds, since they run beside other work of the same device."""


def busy_in_all(busy: Mapping[str, float]) -> float:
    """Return the busy seconds without double counting."""
    return sum(seconds for work, seconds in busy.items() if work not in BESIDE)


class Server(Protocol):
    """Interface of one replica of a stage.

    It gets a callback for finished jobs, and calls it once for each job that it was given and that was not
    withdrawn by `kill` or `abort`.
    """

    @property
    def in_flight(self) -> int:
        """Return the number of its jobs."""

    def submit(self, job: Job) -> None:
        """Start or queue a job."""

    def abort(self, job: Job) -> None:
        """Forget a job; unknown ones are ignored."""

    def kill(self) -> list[Job]:
        """Kill the server and return its lost jobs in order of arrival."""

    def busy_seconds(self) -> dict[str, float]:
        """Return the device seconds up to now by kind of work, such as ``llm``, ``encode``, ``decode``.

        Kinds in `BESIDE` overlap with others.
        """
