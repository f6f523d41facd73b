"""Define requests and their multimodal items."""

import math
from dataclasses import dataclass
from typing import NamedTuple

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
