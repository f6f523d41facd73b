"""The parts of video decoding that work on this machine, for `doctor`."""

from __future__ import annotations

from importlib import import_module

from vllm_omni_sched.compat import Status
from vllm_omni_sched.config import OmniSchedConfig, read_options
from vllm_omni_sched.errors import OmniSchedError
from vllm_omni_sched.extras import how_to_install
from vllm_omni_sched.video import sandbox
from vllm_omni_sched.video.kinds import Kind, kinds_of
from vllm_omni_sched.video.options import VideoOptions

_WITHOUT = {
    sandbox.Part.SECCOMP: "decoder processes could reach the network",
    sandbox.Part.LANDLOCK: "decoder processes could read files that this user can",
}


def video_parts(config: OmniSchedConfig) -> tuple[list[Status], list[str]]:
    """Return the status of each part, and the problems that prevent a server from starting with our video loader."""
    pyav = _pyav()
    parts, problems = [pyav], []
    try:
        options = read_options(VideoOptions, config.video, group="video")
    except OmniSchedError as error:
        problems.append(str(error))
        options = VideoOptions()
    try:
        parts += [_decoders(kind, pyav) for kind in kinds_of(options)]
    except OmniSchedError as error:
        problems.append(str(error))
    missing = sandbox.missing()
    for part in sandbox.Part:
        gone = part in missing
        reason = f"not on this system: {_WITHOUT[part]}" if gone else "decoder processes are confined by it"
        parts.append(Status(part.value, not gone, reason))
    return parts, problems


def _pyav() -> Status:
    try:
        return Status("PyAV", True, str(import_module("av").__version__))
    except ModuleNotFoundError as error:
        if error.name == "av":
            return Status("PyAV", False, f"not installed: {how_to_install('video')}")
        return Status("PyAV", False, f"installed but cannot be imported: {error}")
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is the finding
        return Status("PyAV", False, f"installed but cannot be imported: {type(error).__name__}: {error}")


def _decoders(kind: Kind, pyav: Status) -> Status:
    """Return the status of a kind of decoders; both kinds need PyAV, to index videos and for those a GPU refuses."""
    if not pyav.active:
        return Status(f"decoders, {kind.name}", False, "they need PyAV")
    return Status(f"decoders, {kind.name}", bool(kind.devices), f"{len(kind.devices)} processes")
