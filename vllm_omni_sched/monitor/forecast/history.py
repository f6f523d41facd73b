"""The history of arrivals, so that a forecast can go on after a restart."""

import math

import msgspec

from vllm_omni_sched.config.errors import ConfigError

FORMAT = "vllm-omni-sched arrivals 1"


class ArrivalHistory(msgspec.Struct, frozen=True):
    """Counts of arrivals by modality, the oldest bin first.

    ``bin_seconds``: width of the bins. ``until``: wall-clock time of the end of the last bin, in seconds since 1970.
    """

    bin_seconds: float
    until: float
    counts: dict[str, tuple[float, ...]]
    format: str = FORMAT


def bytes_of(history: ArrivalHistory) -> bytes:
    """Return the content of a file with a history."""
    return msgspec.json.encode(history)


def history_of(content: bytes) -> ArrivalHistory:
    """Return the history in a file.

    Raises:
        ConfigError: it is none.
    """
    try:
        found = msgspec.json.decode(content, type=ArrivalHistory)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"it is not a history of arrivals: {error}") from None
    if found.format != FORMAT:
        raise ConfigError(f"its format is {found.format!r}, not {FORMAT!r}")
    if not all(0 <= count < math.inf for counts in found.counts.values() for count in counts):
        raise ConfigError("it has counts that are negative or infinite")
    return found


def continued(counts: tuple[float, ...], missed: int, season_bins: int) -> tuple[float, ...]:
    """Return counts with bins added in which nothing was observed, because the server did not run.

    A missing bin gets the count of one season before, or the last count while there is none. Zeros would say that
    nobody had asked.
    """
    found = list(counts)
    for _ in range(missed if counts else 0):
        found.append(found[-season_bins] if len(found) >= season_bins else counts[-1])
    return tuple(found)
