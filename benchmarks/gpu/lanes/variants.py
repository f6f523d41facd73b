"""The ways to run an encoder beside a decode loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Encoder(str, Enum):
    """Where the encoder runs."""

    NOWHERE = "nowhere"
    IN_STEP = "in step"  # before each decode step, on its stream: stock vLLM with an image in every step
    STREAM = "stream"  # a thread and a stream of its own, nothing else
    LANE = "lane"  # vllm_omni_sched.lanes.StreamLane


@dataclass(frozen=True)
class Variant:
    """Describes a way to share a GPU.

    ``sms``: None for all multiprocessors; ``prior``: decode on a stream of top priority.
    """

    name: str
    encoder: Encoder
    decodes: bool = True
    prior: bool = False
    sms: int | None = None
    share: float = 1.0


DECODE_ALONE = Variant("decode alone", Encoder.NOWHERE)
ENCODE_ALONE = Variant("encode alone", Encoder.STREAM, decodes=False)


def variants(sms: Sequence[int], shares: Sequence[float]) -> list[Variant]:
    """Return all variants, first the two that run alone, to which the others are compared."""
    return [
        DECODE_ALONE,
        ENCODE_ALONE,
        Variant("same stream", Encoder.IN_STEP),
        Variant("side stream", Encoder.STREAM),
        Variant("side stream, decode prior", Encoder.STREAM, prior=True),
        *(Variant(f"side stream, {count} SMs", Encoder.STREAM, sms=count) for count in sms),
        *(Variant(f"lane, share {share:g}", Encoder.LANE, share=share) for share in shares),
        *(Variant(f"lane, share {share:g}, decode prior", Encoder.LANE, share=share, prior=True) for share in shares),
        *(Variant(f"lane, {count} SMs", Encoder.LANE, sms=count) for count in sms),
    ]
