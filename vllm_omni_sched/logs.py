"""Names of our loggers: under ``vllm``, so that vLLM's handler, level and logging configuration apply to them."""

import logging

LOGGER = "vllm.omni_sched"
_PACKAGE = "vllm_omni_sched"


def logger_name(module: str) -> str:
    """Return the name of the logger of one of our modules.

    Raises:
        ValueError: the module is none of ours.
    """
    if module != _PACKAGE and not module.startswith(f"{_PACKAGE}."):
        raise ValueError(f"module {module!r} is not in the package {_PACKAGE!r}")
    return LOGGER + module.removeprefix(_PACKAGE)


def get_logger(module: str) -> logging.Logger:
    """Return the logger of one of our modules; where vLLM is loaded, `init_logger(logger_name(module))` adds to it."""
    return logging.getLogger(logger_name(module))
