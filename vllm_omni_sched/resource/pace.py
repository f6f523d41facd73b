"""How far decode steps make room for the encoder, where both share the same processors."""

from enum import Enum

from vllm_omni_sched.errors import ConfigError

PACE, PACE_BESIDE = 0.8, 0.3
"""Of the target between tokens: where the encoder needs the processors of the LLM, and where it has others, too."""


class PaceReason(str, Enum):
    """Why a step waits as long as it does."""

    NOT_ENCODING = "not_encoding"  # not at all: nothing is being encoded
    NO_DECODE = "no_decode"  # not at all here: a step without tokens waits for an encode anyway
    OVER_TARGET = "over_target"  # not at all: decoding is slower than promised already
    SHARE = "share"  # for as long as the lane's share asks
    TARGET = "target"  # for less than that, or tokens would be late


class DecodePace:
    """Rests between decode steps while an encode runs, so that the lane gets its share of the time.

    A lane of low priority gets what decoding leaves, which on a CPU is next to nothing, and decoding much faster than
    promised serves nobody (a reader takes in 50 tokens a second at most). So, with a step that takes ``busy`` seconds:

    1. It rests busy * share / (1 - share).
    2. But a step and its rest take at most ``fraction`` of the inter-token-latency target.
    3. Nobody rests while the measured latency is above the target.

    Args:
        fraction: of the target, in [0, 1]; 0 is never to rest.

    Raises:
        ConfigError: ``fraction`` is outside that range.
    """

    def __init__(self, fraction: float) -> None:
        if not 0 <= fraction <= 1:
            raise ConfigError(f"decode_pace must be in [0, 1], got {fraction}")
        self.fraction = fraction

    def rest(
        self,
        share: float,
        busy_seconds: float,
        itl_seconds: float | None,
        itl_target_seconds: float,
        *,
        encoding: bool,
        decoding: bool,
    ) -> tuple[float, PaceReason]:
        """Seconds to rest before the next step, and why."""
        if not encoding:
            return 0.0, PaceReason.NOT_ENCODING
        if not decoding:
            return 0.0, PaceReason.NO_DECODE
        if itl_seconds is not None and itl_seconds > itl_target_seconds:
            return 0.0, PaceReason.OVER_TARGET
        most = max(0.0, self.fraction * itl_target_seconds - busy_seconds)
        wanted = busy_seconds * share / (1 - share) if share < 1 else most
        return (wanted, PaceReason.SHARE) if wanted < most else (most, PaceReason.TARGET)
