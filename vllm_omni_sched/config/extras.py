"""Name the packages that only some parts of this package need, and how to install them.

This package is on no index, so its extras can be installed by name from a checkout only; their packages, anywhere.
"""

import shlex
from importlib import metadata

EXTRAS = {
    "vllm": ("vllm>=0.22.1,<0.34",),
    "video": ("av", "pillow"),
    "mooncake": ("mooncake-transfer-engine",),
    "compression": ("numcodecs", "numpy"),
    "forecast": ("statsmodels",),
    "tune": ("optuna",),
    "gpu": ("nvidia-ml-py",),
}
"""As in ``pyproject.toml``, those that a message names."""


def how_to_install(extra: str) -> str:
    """Return the command that installs what an extra of this package holds."""
    return f"pip install {shlex.join(EXTRAS[extra])}"


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
