"""Kinds of decoders: how each is made, what it needs, and how many there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import Toggle
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.sandbox.seccomp import Profile

CPU = "pyav"
NVDEC = "nvdec"
NO_DEVICE = -1
_DRIVER = "/proc/driver/nvidia/version"
_QUERY_SECONDS = 60.0
# in a process of its own: a process that loads the driver holds memory on each card from then on
_QUERY = (
    "import json; from vllm_omni_sched.video.decoders.nvdec.library import gpus_of_engines;"
    "print(json.dumps(gpus_of_engines({at_most})))"
)


@dataclass(frozen=True)
class DecoderKind:
    """A kind of decoder processes.

    Attributes:
        name: name of the kind, also in metrics.
        decoder: ``module:name`` of the decoder's factory in its process; called with the device if there is one.
        devices: one process for each; `NO_DEVICE` for processes on CPUs.
    """

    name: str
    decoder: str
    profile: Profile
    devices: tuple[int, ...]


def cpu_kind(options: VideoOptions) -> DecoderKind:
    """Return the kind of decoders on CPUs."""
    number = len(os.sched_getaffinity(0)) if options.decoders == "auto" else options.decoders
    return DecoderKind(CPU, "vllm_omni_sched.video.decoders.pyav:PyAvDecoder", Profile.CPU, (NO_DEVICE,) * number)


def nvdec_kind(options: VideoOptions, engines: Callable[[int | None], tuple[int, ...]]) -> DecoderKind | None:
    """Return the kind of decoders on GPUs; None if there are none.

    Args:
        engines: returns the GPU of each engine, with at most the given number of one GPU.

    Raises:
        ConfigError: the option is ``on``, and there are none.
    """
    if options.nvdec is Toggle.OFF:
        return None
    devices = engines(None if options.nvdec_engines == "auto" else options.nvdec_engines)
    if devices:
        return DecoderKind(NVDEC, "vllm_omni_sched.video.decoders.nvdec.decoder:NvdecDecoder", Profile.DEVICE, devices)
    if options.nvdec is Toggle.ON:
        raise ConfigError(
            "option 'nvdec' is 'on', but no GPU decoder can be used here: install PyNvVideoCodec and a driver "
            "with video support, or set it to 'auto'"
        )
    return None


def engines_here(at_most: int | None) -> tuple[int, ...]:
    """Return the GPU of each decoding engine of this machine, found by a short-lived process."""
    if not os.path.exists(_DRIVER):
        return ()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path)}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _QUERY.format(at_most=at_most)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_QUERY_SECONDS,
            env=environment,
            cwd="/",
            check=True,
        )
        return tuple(map(int, json.loads(answer.stdout)))
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def decoder_kinds(options: VideoOptions) -> tuple[DecoderKind, ...]:
    """Return the kinds of decoders here, the preferred one first; the last one decodes every supported video.

    Raises:
        ConfigError: option ``nvdec`` is ``on``, and no GPU can be used.
    """
    nvdec = nvdec_kind(options, engines_here)
    return (cpu_kind(options),) if nvdec is None else (nvdec, cpu_kind(options))
