"""Define all errors that this package raises on purpose.

::

    OmniSchedError
    ├── ConfigError              an option is unknown, of the wrong type, out of range, or cannot work
    │   ├── GraphError           the stages do not make a graph that a request can go through
    │   └── NoLaneError          the model that was loaded, or its worker, cannot have an encoder lane
    ├── RequestError             a request sets an option that is unknown or out of range
    ├── UnsupportedVllmError     the installed vLLM is not one we support
    ├── MissingSymbolError       a vLLM name that a feature relies on is gone
    ├── SessionOutOfSyncError    a worker and the scheduler disagree on the state of a session
    ├── EncodingLostError        a worker lacks an encoding that the scheduler counts on
    ├── LaneError                work in a lane failed
    │   ├── LaneClosedError      the lane was closed before
    │   ├── LaneDiedError        its process ended during the work
    │   ├── LaneGroupError       the lane of another rank ended, or did not come
    │   ├── LanePeerError        the same work failed at another rank
    │   └── LaneWorkError        the work itself raised
    ├── VideoError               a video could not be decoded
    │   ├── VideoInputError      because of what is in it
    │   │   └── VideoLimitError  it is larger or longer than the options allow
    │   ├── VideoDeadlineError   not in time
    │   └── DecoderError         no decoder is left, or the service was closed before
    ├── PreprocessError          the preprocessing pool did not prepare the items of a request
    │   ├── PreprocessInputError     because of what is in them
    │   ├── PreprocessDeadlineError  not in time
    │   ├── PreprocessCancelledError because nobody waits for them any more
    │   ├── PreprocessProcessError   no process of the pool can, or the pool was closed before
    │   └── UnsupportedValueError    something in them, or in the result, cannot be sent to another process
    └── ConnectorError           a message between stages did not get through
        ├── PayloadError         something in it cannot be sent
        ├── NoRoomError          the transport has no room for it now
        │   ├── ReceiverBehindError   there is room, and the receiver is too far behind
        │   └── MessageTooLargeError  the transport will never have room for it
        ├── CorruptMessageError  what arrived is not what was sent
        ├── RendezvousError      the place where two processes meet cannot be used, or is not ours
        ├── DeviceLostError      its tensors lie on a device that cannot be reached from here, or any more
        ├── TransportClosedError the transport was closed before
        └── CompressionError     a compressed buffer cannot be read
            ├── CorruptDataError   it is nothing that its codec can have written
            └── CodecMissingError  its codec is unknown here, or the library of the codec is not installed
"""


class OmniSchedError(Exception):
    """Base of all errors of vllm-omni-sched."""


class ConfigError(OmniSchedError, ValueError):
    """An option cannot be used; the message names the key and the fix."""


class NoLaneError(ConfigError):
    """The model that a worker has loaded cannot have an encoder lane; the message is that for ``encode_ahead``."""


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


class LaneGroupError(LaneError):
    """The lane of another rank has ended, does not come, or does other work: this lane can do no more work with it."""


class LanePeerError(LaneError):
    """The same work failed at another rank; later work is not affected."""


class LaneWorkError(LaneError):
    """The work itself raised; the message is that of its exception."""


class VideoError(OmniSchedError):
    """Raised when a video could not be decoded."""


class VideoInputError(VideoError, ValueError):
    """The input cannot be decoded: it is not a video, has no frames, or is too damaged. The message says which."""


class VideoLimitError(VideoInputError):
    """The video is larger or longer than an option allows. The message names the option."""


class VideoDeadlineError(VideoError, TimeoutError):
    """The video was not decoded before its deadline."""


class DecoderError(VideoError, RuntimeError):
    """Raised when no decoder can decode the video, or the decoding service is closed."""


class PreprocessError(OmniSchedError):
    """The preprocessing pool did not prepare the items of a request."""


class PreprocessInputError(PreprocessError, ValueError):
    """The items cannot be prepared because of what is in them; the message is that of vLLM."""


class PreprocessDeadlineError(PreprocessError, TimeoutError):
    """The items were not prepared before the deadline of their class."""


class PreprocessCancelledError(PreprocessError):
    """The items were not prepared, because their request was cancelled."""


class PreprocessProcessError(PreprocessError, RuntimeError):
    """The processes of the pool died or failed while preparing the items, or the pool was closed."""


class UnsupportedValueError(PreprocessError, TypeError):
    """A value has a type that is not sent between processes. The message names the type."""


class ConnectorError(OmniSchedError, RuntimeError):
    """A message between stages was not delivered. The error names its edge or key, and the fix if there is one."""


class PayloadError(ConnectorError, TypeError):
    """A value in a payload has a type that cannot be sent. The message names the type and the types that can."""


class NoRoomError(ConnectorError):
    """The transport has no room for the message at the moment."""


class ReceiverBehindError(NoRoomError):
    """The receiver of an edge is too far behind: it must get messages before more are sent, by any transport."""


class MessageTooLargeError(NoRoomError):
    """The message is larger than the transport can ever hold."""


class CorruptMessageError(ConnectorError):
    """A received message is truncated, damaged, or not the requested one. It was dropped."""


class RendezvousError(ConnectorError):
    """The directory where processes meet cannot be used, or does not belong to this user alone."""


class DeviceLostError(ConnectorError):
    """The tensors of a message are on a device that this process cannot access, or were lost with their sender."""


class TransportClosedError(ConnectorError):
    """The transport is closed."""


class CompressionError(ConnectorError):
    """A compressed buffer cannot be read."""


class CorruptDataError(CompressionError):
    """A compressed buffer is not valid output of its codec for its data type and shape."""


class CodecMissingError(CompressionError):
    """The codec of a compressed buffer is unknown, or its library is not installed."""
