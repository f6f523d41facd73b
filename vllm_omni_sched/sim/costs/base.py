"""The interfaces of cost models. Each says where its numbers are from."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from vllm_omni_sched.sim.work import Clip, Request


class SourceKind(str, Enum):
    """How a number is known."""

    MEASURED = "measured"  # on the machine that the file names, by `vllm-omni-sched calibrate`
    PUBLISHED = "published"  # by the maker of the hardware or the model, or in a paper
    ROOFLINE = "roofline"  # from shapes, and published peaks times an assumed part of them
    ASSUMED = "assumed"  # nothing better is known


@dataclass(frozen=True)
class Source:
    """Where a cost is from; ``text`` names the document, the command or the reason."""

    kind: SourceKind
    text: str


class EngineCosts(Protocol):
    """Seconds of an engine's work on its device or devices.

    ``share`` is always the part of the device's streaming multiprocessors (or cores) that the work has.
    """

    source: Source
    kv_tokens: int
    """Tokens of KV cache that a replica has room for."""

    def step_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float, share: float = 1.0
    ) -> float:
        """A step of the LLM: ``decodes`` requests make a token each, reading ``context_tokens`` in all;
        ``prefill_tokens`` of prompts are computed, with ``prefill_pairs`` pairs of a query and a key. More tokens to
        read take no less."""

    def operations_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float
    ) -> float | None:
        """What the operations of steps take where nothing else does, of arguments added up over any number of them;
        None where that is not known."""

    def encode_seconds(self, modality: str, embeds: int, items: int = 1, share: float = 1.0) -> float:
        """So many items are encoded together, ``embeds`` embeddings in all."""

    def lane_seconds(
        self, modality: str, embeds: int, items: int = 1, share: float = 1.0, beside: bool = False
    ) -> float:
        """The same in the lane of encode-ahead, with that share of the time; ``beside``: steps run meanwhile."""

    def in_lane(self, share: float) -> float:
        """The part that is left to the LLM while the lane of encode-ahead works with ``share``; 1: they do not meet."""

    def frontend_seconds(self, request: Request) -> float:
        """Time in the front end before the engine is given the request: tokenizing, preprocessing of items."""

    @property
    def answer_seconds(self) -> float:
        """From the end of a step until the client has its tokens."""


class DecoderCosts(Protocol):
    """Seconds of one video decoder: a core, or an engine of a GPU."""

    source: Source

    def frames_seconds(self, clip: Clip, frames: int) -> float:
        """So many frames in a row are decoded."""

    @property
    def piece_seconds(self) -> float:
        """To begin one more piece of a video: opening, seeking, handing over."""
