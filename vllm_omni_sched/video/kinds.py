"""Kinds of decoders: what makes one, what it may do, and how many there are."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.seccomp import Profile

CPU = "pyav"
NO_DEVICE = -1


@dataclass(frozen=True)
class Kind:
    """A kind of decoder processes.

    Attributes:
        name: of the kind, also in metrics.
        decoder: ``module:name`` of what makes the decoder in its process; called with the device if there is one.
        devices: one process for each; `NO_DEVICE` for processes on CPUs.
    """

    name: str
    decoder: str
    profile: Profile
    devices: tuple[int, ...]


def cpu_kind(options: VideoOptions) -> Kind:
    """Decoders on CPUs."""
    number = len(os.sched_getaffinity(0)) if options.decoders == "auto" else options.decoders
    return Kind(CPU, "vllm_omni_sched.video.pyav:PyAvDecoder", Profile.CPU, (NO_DEVICE,) * number)
