"""How to install what this package needs for some of its parts only.

This package is on no index, so that its extras can be named from a checkout only; what they hold can be named anywhere.
"""

import shlex

EXTRAS = {
    "vllm": ("vllm>=0.22.1,<0.34",),
    "video": ("av", "pillow"),
    "mooncake": ("mooncake-transfer-engine",),
    "compression": ("numcodecs", "numpy", "soundfile"),
    "forecast": ("statsmodels",),
    "tune": ("optuna",),
    "sim": ("matplotlib",),
}
"""As in ``pyproject.toml``, those that a message names."""


def how_to_install(extra: str) -> str:
    """Return the command that installs what an extra of this package holds."""
    return f"pip install {shlex.join(EXTRAS[extra])}"
