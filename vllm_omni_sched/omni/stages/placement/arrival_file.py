"""Keep the history of arrivals in a file of the current user."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.forecast.history import bytes_of, history_of
from vllm_omni_sched.monitor.forecast.load import LoadForecast

logger = get_logger(__name__)

LARGEST_BYTES = 64 << 20  # of a file that is read; real ones have some hundred kilobytes


class ArrivalFile:
    """Loads a history into a model at the start, and saves it once per bin; a bad file or a full disk is a warning.

    The size of the file is bounded by the history that the model keeps. It replaces the one before only when it is
    written completely. The methods wait for the disk: call them in a thread.

    Args:
        path: of the file.
        wall: the wall clock.
    """

    def __init__(self, path: Path, wall: Clock) -> None:
        self._path, self._wall = path, wall
        self._complained = False

    def load(self, model: LoadForecast, now: float) -> None:
        """Give the model the history in the file, if there is one."""
        try:
            with os.fdopen(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                content = file.read(LARGEST_BYTES)
            model.restore(history_of(content), now, self._wall())
        except FileNotFoundError:
            logger.info("there is no history of arrivals in %s yet; the forecast begins without one", self._path)
        except (OSError, ConfigError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            logger.warning(
                "the history of arrivals in %s is not used (%s); the forecast begins without one", self._path, why
            )

    def save(self, model: LoadForecast, now: float) -> None:
        """Replace the file by the present history."""
        draft = self._path.with_name(f".{self._path.name}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(draft, flags, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o600)
                file.write(bytes_of(model.history(now, self._wall())))
            os.replace(draft, self._path)
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.warning(
                    "the history of arrivals cannot be saved in %s (%s); it is tried again after each bin",
                    self._path,
                    error.strerror,
                )
            return
        self._complained = False
