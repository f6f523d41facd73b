"""Decide, before weights are loaded, what a profile turns on in an engine, and what it leaves out, with the reason."""

from dataclasses import dataclass
from typing import Any

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.config.profiles import PROFILES
from vllm_omni_sched.resource.engine.lane import LaneFacts, obstacle

VIDEO_LOADER = "omni_flashcodec"
"""What a profile with a video loader turns on: it is chosen by an argument of vLLM, and is no option of ours."""

RUST = "vLLM's Rust front end (VLLM_USE_RUST_FRONTEND) runs no plugins"


@dataclass(frozen=True)
class FrontEndFacts:
    """Facts about the process that takes the requests; the defaults allow everything.

    ``rust``: whether it is vLLM's front end in Rust. ``decoder``: what the operator has named to decode videos, as a
    clause; empty if nothing. ``pyav``: how to install PyAV; empty if it is installed.
    """

    rust: bool = False
    decoder: str = ""
    pyav: str = ""


@dataclass(frozen=True)
class Withheld:
    """An option, set by a profile or on by default, that stays off in this engine, with the reason."""

    option: str
    reason: str

    def __str__(self) -> str:
        return f"{self.option} stays off, because {self.reason}"


@dataclass(frozen=True)
class Fitted:
    """The options that an engine runs under, and those of its profile and of the defaults that it cannot have.

    ``video_loader``: whether the profile has videos decoded by `VIDEO_LOADER`.
    """

    config: OmniSchedConfig
    withheld: tuple[Withheld, ...] = ()
    video_loader: bool = False


def fit_profile(config: OmniSchedConfig, lane: LaneFacts, front_end: FrontEndFacts | None = None) -> Fitted:
    """Return what an engine runs under. Nothing is refused here that the profile or a default has chosen.

    1. What the operator set is kept: an engine that cannot have it refuses to start.
    2. ``encode_ahead`` of a profile is off where the engine cannot have a lane, or the lane would have nothing to do.
    3. Under vLLM's front end in Rust, there are no metrics of ours, so that none are collected.
    4. The video loader of a profile is left out where `loader_obstacle` has a reason.
    """
    front_end = front_end or FrontEndFacts()
    chosen, withheld, changes = config.from_profile(), [], dict[str, Any]()

    def leave_out(option: str, instead: Any, reason: str) -> None:
        changes[option] = instead
        withheld.append(Withheld(option, reason))

    if chosen.get("encode_ahead") and (why := _no_use_of_a_lane(lane)) is not None:
        leave_out("encode_ahead", False, why)
    if front_end.rust:
        for option in ("metrics", "slo_metrics"):
            if getattr(config, option) and option not in config.given:
                leave_out(option, False, RUST)
    loads_videos = PROFILES[config.profile].video_loader
    if loads_videos and (why := loader_obstacle(lane, front_end)) is not None:
        withheld.append(Withheld(VIDEO_LOADER, why))
        loads_videos = False
    return Fitted(config.model_copy(update=changes) if changes else config, tuple(withheld), loads_videos)


def _no_use_of_a_lane(facts: LaneFacts) -> str | None:
    if not facts.multimodal:
        return "this model takes text alone"
    if (why := obstacle(facts)) is not None:
        return why.reason
    if facts.items_with_workers:
        return (
            "the processor cache keeps items in shared memory that belongs to the workers; "
            "--mm-processor-cache-type lru keeps them where they can be encoded ahead"
        )
    return None


def loader_obstacle(lane: LaneFacts, front_end: FrontEndFacts) -> str | None:
    """Return why a profile leaves the decoding of videos to vLLM; None if `VIDEO_LOADER` does it."""
    if not lane.multimodal:
        return "this model takes text alone"
    if front_end.rust:
        return RUST
    if front_end.decoder:
        return front_end.decoder
    return f"PyAV is not installed: {front_end.pyav}" if front_end.pyav else None


def front_end_refusal(config: OmniSchedConfig, *, processes: int) -> str | None:
    """Return why options that the operator set cannot work under vLLM's front end in Rust; None if all can.

    Args:
        config: the options.
        processes: ``preprocess.processes``.
    """
    asked: list[str] = [name for name in ("metrics", "slo_metrics") if name in config.given and getattr(config, name)]
    if processes:
        asked.append("preprocess.processes")
    if not asked:
        return None
    return f"option {asked[0]!r} cannot work here, because {RUST}: leave it out, or unset VLLM_USE_RUST_FRONTEND"
