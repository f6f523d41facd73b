"""Green contexts of the double, asked for as torch asks for them: by NVIDIA's `cuda.bindings`."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from tests.cuda_double.control import load_driver

SM = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
DEFAULT_STREAM = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
NON_BLOCKING = driver.CUstream_flags.CU_STREAM_NON_BLOCKING


def ask(function: str, *args: Any) -> Any:
    """Call the driver; return what it gives besides its error, which must be none."""
    load_driver()
    error, *found = getattr(driver, function)(*args)
    assert error == driver.CUresult.CUDA_SUCCESS, f"{function}: {error.name}"
    return found[0] if len(found) == 1 else tuple(found)


def error_of(function: str, *args: Any) -> str:
    """Call the driver and return the name of its error."""
    load_driver()
    name: str = getattr(driver, function)(*args)[0].name
    return name


def whole(device: int = 0) -> Any:
    """Return all multiprocessors of a device."""
    return ask("cuDeviceGetDevResource", device, SM)


def context_of(parts: list[Any], device: int = 0) -> Any:
    """Create a green context of parts of one split."""
    return ask("cuGreenCtxCreate", ask("cuDevResourceGenerateDesc", parts, len(parts)), device, DEFAULT_STREAM)


def new_context(count: int = 8, device: int = 0) -> Any:
    """Create a green context of at least so many multiprocessors."""
    parts, _, _ = ask("cuDevSmResourceSplitByCount", 1, whole(device), 0, count)
    return context_of(parts, device)


def new_stream(context: Any, priority: int = 0) -> int:
    """Return the handle of a new stream of a green context."""
    return int(ask("cuGreenCtxStreamCreate", context, NON_BLOCKING, priority))


def multiprocessors_of(stream: int) -> int | None:
    """Return how many multiprocessors the context of a stream has; None if it is not a green one."""
    context = ask("cuStreamGetGreenCtx", stream)
    return int(ask("cuGreenCtxGetDevResource", context, SM).sm.smCount) if int(context) else None
