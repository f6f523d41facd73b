"""Everything this package raises on purpose.

::

    OmniSchedError
    ├── ConfigError              an option is unknown, of the wrong type, out of range, or cannot work
    ├── RequestError             a request says something about itself that makes no sense
    ├── UnsupportedVllmError     the installed vLLM is not one we support
    ├── MissingSymbolError       a vLLM name that a feature relies on is gone
    ├── SessionOutOfSyncError    a worker holds another state of a session than the scheduler believes
    ├── EncodingLostError        a worker does not hold an encoding that the scheduler believes it holds
    └── LaneError                a piece of work in a lane came to nothing
        ├── LaneClosedError      the lane was closed before
        ├── LaneDiedError        its process ended in the middle of it
        └── LaneWorkError        the work itself raised
"""


class OmniSchedError(Exception):
    """Base of all errors of vllm-omni-sched."""


class ConfigError(OmniSchedError, ValueError):
    """An option cannot be used; the message names the key and the fix."""


class RequestError(OmniSchedError, ValueError):
    """A request cannot be served as it is; the message names the field and the fix."""


class UnsupportedVllmError(OmniSchedError, RuntimeError):
    """The installed vLLM is outside the supported versions; the message lists them."""


class MissingSymbolError(OmniSchedError, RuntimeError):
    """A feature was asked for whose vLLM extension point does not exist in this version."""


class SessionOutOfSyncError(OmniSchedError, RuntimeError):
    """A session update does not continue what the worker holds; applying it would give wrong tokens."""


class EncodingLostError(OmniSchedError, RuntimeError):
    """An encoding was to be restored that is not there; going on would give wrong tokens."""


class LaneError(OmniSchedError, RuntimeError):
    """A piece of work in a lane came to nothing."""


class LaneClosedError(LaneError):
    """The lane was closed before the work was done."""


class LaneDiedError(LaneError):
    """The process that did the work ended in the middle of it."""


class LaneWorkError(LaneError):
    """The work itself raised; the message is that of its exception."""
