"""Check that files and folders which the options name can be written, before anything starts that needs them."""

import os
import stat
import tempfile
from pathlib import Path

from vllm_omni_sched.config.errors import ConfigError


def check_folder(option: str, folder: str) -> None:
    """Check that files can be made in a folder. Nothing stays behind.

    Raises:
        ConfigError: they cannot; the message names the option and the reason.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"option {option!r}: no file can be made in {folder!r} ({error.strerror}): make that folder writable, or "
            "name another one"
        ) from None


def check_file(option: str, path: str) -> None:
    """Check that a file of the current user can be written, or made where it does not exist yet.

    Raises:
        ConfigError: it cannot; the message names the option and the reason.
    """
    check_folder(option, str(Path(path).parent))
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"option {option!r}: {path!r} is not a file of this user: name another one")
