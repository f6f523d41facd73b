"""Profiles: one word that sets several options for a kind of traffic.

Committed benchmarks measure `chat` (`benchmarks.mixed`). The profile `video` sets the options of `chat` with other
targets and a video loader; only the loader has been measured (`benchmarks.video_server`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any


class Profile(str, Enum):
    """Kind of traffic that an engine serves."""

    EXACT = "exact"
    CHAT = "chat"
    REALTIME = "realtime"
    VIDEO = "video"


@dataclass(frozen=True)
class ProfileSettings:
    """What a profile stands for.

    ``traffic``: the requests it is meant for. ``options``: the options it sets, unless the operator sets them.
    ``video_loader``: whether videos are decoded by ``omni_flashcodec``, unless the operator names a loader.
    """

    traffic: str
    options: Mapping[str, Any] = field(default_factory=dict)
    video_loader: bool = False


_BESIDE = {"encode_ahead": True, "waiting_order": "sla", "prefill_control": "adaptive", "slo_metrics": True}
"""The combination that `benchmarks.mixed` measures: encode beside the steps, run by deadline, bound prompt tokens."""

PROFILES: Mapping[Profile, ProfileSettings] = MappingProxyType(
    {
        Profile.EXACT: ProfileSettings("any; vLLM's own decisions"),
        Profile.CHAT: ProfileSettings(
            "chat with pictures and audio clips",
            {**_BESIDE, "control_target_ms": 80.0, "interactive_ttft_ms": 2000.0, "interactive_itl_ms": 100.0},
        ),
        Profile.REALTIME: ProfileSettings(
            "streaming sessions, alone or beside chat",
            {**_BESIDE, "control_target_ms": 50.0, "realtime_ttft_ms": 300.0, "realtime_itl_ms": 50.0},
        ),
        Profile.VIDEO: ProfileSettings(
            "questions about videos",
            {**_BESIDE, "control_target_ms": 80.0, "interactive_ttft_ms": 5000.0, "interactive_itl_ms": 100.0},
            video_loader=True,
        ),
    }
)

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "encode_ahead": "pictures, sounds and videos are encoded beside the steps of the LLM",
        "waiting_order": "waiting requests run by class and deadline",
        "prefill_control": "prompt tokens are computed in pieces that keep a step at its target",
        "slo_metrics": "latencies are measured by class",
    }
)
"""Words for the options of profiles, as the log names them; options that are not here are targets."""

GIVES_WAY: Mapping[str, tuple[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "encode_ahead": ("encode_rounds", (True,)),
    }
)
"""Options of profiles that are left out if the operator sets an option that excludes them to one of the values."""


def options_of(profile: Profile, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a profile sets beside those that the operator has given, which win."""
    chosen = {name: value for name, value in PROFILES[profile].options.items() if name not in given}
    for name, (other, values) in GIVES_WAY.items():
        if name in chosen and other in given and given[other] in values:
            del chosen[name]
    return chosen
