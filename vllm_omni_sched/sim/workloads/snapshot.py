"""Turn the counters that a vLLM server has now into a trace: one interval with its rate and its histograms."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.workloads.recorder import Scrape, between
from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Header, Trace

_HITS, _QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"
UNKNOWN = (
    "that a long prompt has a long or a short answer: sizes are drawn independently",
    "bursts, and the course of a day: arrivals are even over the time that the counters cover",
    "which prompts begin alike: no request finds a prefix in the cache",
    "the modality and the size of items",
)
"""What counters do not tell, so that it is not in the trace."""


@dataclass(frozen=True)
class Snapshot:
    """A trace from counters.

    ``covered_seconds``: the time that they cover. ``rate``: requests per second in it. ``cached``: fraction of the
    prompt tokens that the server's prefix cache had; ``acceptance``: of its first draft tokens; None if not known.
    """

    trace: Trace
    covered_seconds: float
    rate: float
    cached: float | None
    acceptance: float | None


def snapshot(now: Scrape, before: Scrape | None, covered_seconds: float, seconds: float, source: str) -> Snapshot:
    """Return a trace of so many seconds with the load between two scrapes.

    1. Requests arrive at the mean rate; arrivals are counted as `Recorder` does.
    2. Their tokens are those of the histograms. A replay draws each request from them.

    Args:
        before: None for the begin of the server.

    Raises:
        ConfigError: no request has finished, the server has restarted, or a time is not positive.
    """
    if not covered_seconds > 0:
        raise ConfigError("it is not known how long the counters cover: give --over SECONDS")
    if before is not None and before.restarted(now):
        raise ConfigError("the server has restarted between the two scrapes: take both anew, or give the second alone")
    whole = between(Scrape() if before is None else before, now, 0.0, covered_seconds)
    if not whole.finished or not whole.generation_tokens.requests:
        raise ConfigError("no request has finished yet: look again later")
    rate = whole.arrivals / covered_seconds
    arrivals = round(rate * seconds)
    if not arrivals:
        raise ConfigError(f"{rate:.3g} requests a second make none in {seconds:g} s: raise --seconds")
    header = Header(FORMAT, VERSION, interval_seconds=seconds, source=source)
    entry = msgspec.structs.replace(whole, seconds=seconds, arrivals=arrivals)
    ratios = [_ratio(now, before, *names) for names in ((_HITS, _QUERIES), (_ACCEPTED, _DRAFTS))]
    return Snapshot(Trace(header, intervals=(entry,)), covered_seconds, rate, ratios[0], ratios[1])


def _ratio(now: Scrape, before: Scrape | None, part: str, whole: str) -> float | None:
    then = Scrape() if before is None else before
    total = now.extra.get(whole, 0.0) - then.extra.get(whole, 0.0)
    return (now.extra.get(part, 0.0) - then.extra.get(part, 0.0)) / total if total > 0 else None
