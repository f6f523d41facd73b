"""Everything this package raises on purpose.

::

    OmniSchedError
    ├── ConfigError              an option is unknown, of the wrong type, out of range, or cannot work
    ├── UnsupportedVllmError     the installed vLLM is not one we support
    ├── MissingSymbolError       a vLLM name that a feature relies on is gone
    └── SessionOutOfSyncError    a worker holds another state of a session than the scheduler believes
"""


class OmniSchedError(Exception):
    """Base of all errors of vllm-omni-sched."""


class ConfigError(OmniSchedError, ValueError):
    """An option cannot be used; the message names the key and the fix."""


class UnsupportedVllmError(OmniSchedError, RuntimeError):
    """The installed vLLM is outside the supported versions; the message lists them."""


class MissingSymbolError(OmniSchedError, RuntimeError):
    """A feature was asked for whose vLLM extension point does not exist in this version."""


class SessionOutOfSyncError(OmniSchedError, RuntimeError):
    """A session update does not continue what the worker holds; applying it would give wrong tokens."""
