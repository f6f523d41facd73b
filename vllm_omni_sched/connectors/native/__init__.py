"""Optional compiled steps of small messages; each does the same as the Python code that it stands for, in one call.

`messages.c` is compiled when the package is built or the environment is made, if there is a C compiler. Without it, or
with ``VLLM_OMNI_SCHED_NATIVE=0``, the Python code runs: the bytes of messages are the same, and processes with and
without the compiled steps exchange messages.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

VARIABLE = "VLLM_OMNI_SCHED_NATIVE"
"""Environment variable that turns the compiled steps off when it is 0."""
INTERFACE = 2
"""Number of the functions and layouts in `messages.c`: a module that was built from other sources is not used."""


def load(setting: str | None) -> tuple[Any, str]:
    """Return the compiled module, or None, and the reason.

    Args:
        setting: value of `VARIABLE`.
    """
    if setting == "0":
        return None, f"turned off by {VARIABLE}=0; small messages take the Python path"
    try:
        module = import_module(f"{__name__}._messages")
    except ImportError as error:
        return None, f"not built ({error}); small messages take the Python path"
    if module.INTERFACE != INTERFACE:
        return None, f"built from other sources than these: build it again (python -m {__name__}.build)"
    return module, "small messages through the arena take compiled steps"


_loaded = load(os.environ.get(VARIABLE))
kernel: Any = _loaded[0]
"""The compiled module, None where Python does its work."""
reason: str = _loaded[1]
"""Why `kernel` is used or not, for `vllm-omni-sched doctor`."""
_shown: list[Any] = []


def show_torch(torch: Any) -> None:
    """Let the compiled steps read and make tensors, once torch is imported; without it, Python does."""
    if kernel is not None and not _shown:
        _shown.append(torch)
        kernel.use_torch(torch)
