"""Decide how long decode steps pause for the encoder, where both share the same processors."""

from enum import Enum

from vllm_omni_sched.config.errors import ConfigError

PACE, PACE_BESIDE = 0.8, 0.3
"""Fractions of the ITL target: where the encoder shares the LLM's processors, and where it has others, too."""


class PaceReason(str, Enum):
    """Reason for the length of the pause before a step."""

    NOT_ENCODING = "not_encoding"  # no pause: nothing is being encoded
    NO_DECODE = "no_decode"  # no pause: a step without tokens waits for an encode anyway
    OVER_TARGET = "over_target"  # no pause: decoding is already slower than promised
    SHARE = "share"  # for as long as the lane's share asks
    TARGET = "target"  # shorter than that, or tokens would be late


class DecodePace:
    """Pauses between decode steps while an encode runs, so that the lane gets its share of the time.

    A lane of low priority gets what decoding leaves, which on a CPU is next to nothing, and decoding much faster than
    promised is of no use (people read at most about 50 tokens a second). So, with a step that takes ``busy`` seconds:

    1. The pause is busy * share / (1 - share).
    2. But a step and its pause take at most ``fraction`` of the inter-token-latency target.
    3. There is no pause while the measured latency is above the target.

    Args:
        fraction: fraction of the target, in [0, 1]; 0 means no pauses.

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
        """Return the seconds to pause before the next step, and the reason."""
        if not encoding:
            return 0.0, PaceReason.NOT_ENCODING
        if not decoding:
            return 0.0, PaceReason.NO_DECODE
        if itl_seconds is not None and itl_seconds > itl_target_seconds:
            return 0.0, PaceReason.OVER_TARGET
        most = max(0.0, self.fraction * itl_target_seconds - busy_seconds)
        wanted = busy_seconds * share / (1 - share) if share < 1 else most
        return (wanted, PaceReason.SHARE) if wanted < most else (most, PaceReason.TARGET)
