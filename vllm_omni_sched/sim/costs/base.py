"""Define the interfaces of cost models, each of which names the source of its numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.nearest import did_you_mean
from vllm_omni_sched.sim.work import Clip, Request


class SourceKind(str, Enum):
    """Kind of evidence for a number."""

    MEASURED = "measured"  # on a machine that the file or the text names
    PUBLISHED = "published"  # by the maker of the hardware or the model, or in a paper
    ROOFLINE = "roofline"  # from shapes, and published peaks times an assumed fraction of them
    ASSUMED = "assumed"  # nothing better is known


@dataclass(frozen=True)
class Source:
    """Source of a cost; ``text`` names the document, the command or the reason."""

    kind: SourceKind
    text: str


class EngineCosts(Protocol):
    """Seconds of an engine's work on its device or devices.

    ``share`` is always the fraction of the device's streaming multiprocessors (or cores) that the work gets.
    """

    source: Source
    kv_tokens: int
    """Tokens that fit into a replica's KV cache."""

    def step_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float, share: float = 1.0
    ) -> float:
        """Return the seconds of a step of the LLM.

        ``decodes`` requests make a token each, reading ``context_tokens`` in all;
        ``prefill_tokens`` of prompts are computed, with ``prefill_pairs`` pairs of a query and a key. Reading more
        tokens never takes less time.
        """

    def operations_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float
    ) -> float | None:
        """Return the seconds that the operations of steps take on their own, None if unknown.

        The arguments may be sums over any number of steps.
        """

    def encode_seconds(self, modality: str, embeds: int, items: int = 1, share: float = 1.0) -> float:
        """Return the seconds to encode so many items together, ``embeds`` embeddings in all."""

    def lane_seconds(
        self, modality: str, embeds: int, items: int = 1, share: float = 1.0, beside: bool = False
    ) -> float:
        """Return the seconds to encode items in the lane with that share; ``beside``: steps run meanwhile."""

    def in_lane(self, share: float) -> float:
        """Return the fraction left to the LLM while the lane works with ``share``; 1: they do not interfere."""

    def frontend_seconds(self, request: Request) -> float:
        """Return the front end's seconds before the engine gets the request: tokenizing, preprocessing of items."""

    @property
    def answer_seconds(self) -> float:
        """Return the seconds from the end of a step until the client has its tokens."""


class DecoderCosts(Protocol):
    """Seconds of one video decoder: a core, or an engine of a GPU."""

    source: Source

    def frames_seconds(self, clip: Clip, frames: int) -> float:
        """Return the seconds to decode so many consecutive frames."""

    @property
    def piece_seconds(self) -> float:
        """Return the seconds to begin one more piece of a video: opening, seeking, handing over."""


_Thing = TypeVar("_Thing")


def pick(what: str, name: str, known: Mapping[str, _Thing]) -> _Thing:
    """Return the thing with that name.

    Raises:
        ConfigError: there is none; the message names the nearest, and all.
    """
    found = known.get(name)
    if found is not None:
        return found
    hint = did_you_mean(name, sorted(known))
    raise ConfigError(f"unknown {what} {name!r}: {hint}{' ' if hint else ''}known are {', '.join(sorted(known))}")
