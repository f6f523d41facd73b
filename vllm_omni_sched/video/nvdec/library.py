"""The calls to PyNvVideoCodec."""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_omni_sched.errors import DecoderError
from vllm_omni_sched.video.nvdec.limits import EXACT, FORMATS, Limits, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    import torch

_BUSY = ("out of memory", "out_of_memory")  # messages of the driver when another session does not fit


class NvdecError(DecoderError):
    """NVDEC does not decode this video, or no video at all; the message begins with ``reason``, which is counted."""

    def __init__(self, reason: Refusal, what: str) -> None:
        super().__init__(f"nvdec: {reason.value}: {what}")
        self.reason = reason


class Frame(NamedTuple):
    """A decoded frame: NV12 as for `colour.nv12_to_rgb`, valid until its session is fed again."""

    pts: int
    picture: torch.Tensor


class Library:
    """The used part of PyNvVideoCodec.

    Args:
        module: the module; imported if None.

    Raises:
        NvdecError: it is not installed, or has no driver that it can use.
    """

    def __init__(self, module: ModuleType | None = None) -> None:
        self._module: Any = module or _imported()

    def limits(self, gpu: int, codec: str, pixel_format: str) -> Limits:
        """Return a GPU's limits for a codec and pixel format, both by FFmpeg's names.

        Raises:
            NvdecError: the GPU does not answer.
        """
        pixels = FORMATS[pixel_format]
        chroma = getattr(self._module.cudaVideoChromaFormat, pixels.chroma)
        with self._told(Refusal.NO_DEVICE):
            return Limits.of(
                self._module.GetDecoderCaps(
                    gpuid=gpu, codec=self._codec(codec), chromaformat=chroma, bitdepth=pixels.bits
                )
            )

    def session(self, gpu: int, codec: str) -> Session:
        """Create a decoder session on a GPU; the driver picks the engine.

        Raises:
            NvdecError: no session can be created.
        """
        with self._told(Refusal.FAILED):
            return Session(
                self,
                self._module.CreateDecoder(
                    gpuid=gpu,
                    codec=self._codec(codec),
                    cudacontext=0,  # the primary one, which torch uses
                    cudastream=0,  # the default one, which torch uses
                    usedevicememory=True,
                ),
            )

    def packet(self) -> Any:
        """Return an empty packet, which means the end to a session."""
        return self._module.PacketData()

    @contextlib.contextmanager
    def _told(self, otherwise: Refusal) -> Iterator[None]:
        """Convert all errors of the library, whose exceptions have no common base, to `NvdecError`."""
        try:
            yield
        except Exception as error:
            unsupported = getattr(self._module, "PyNvVCExceptionUnsupported", ())
            busy = any(word in str(error).lower() for word in _BUSY)
            reason = Refusal.BUSY if busy else Refusal.CODEC if isinstance(error, unsupported) else otherwise
            raise NvdecError(reason, f"{type(error).__name__}: {error}"[:400]) from error

    def _codec(self, codec: str) -> Any:
        return getattr(self._module.cudaVideoCodec, EXACT[codec])


class Session:
    """A decoder session of the library, which allocates its surfaces when it sees the first packet."""

    def __init__(self, library: Library, decoder: Any) -> None:
        self._library, self._decoder = library, decoder

    def feed(self, data: bytes, pts: int) -> Iterator[Frame]:
        """Decode a packet and yield frames in display order; the frame of a packet may come after later packets.

        Raises:
            NvdecError: the library failed.
        """
        import numpy as np

        held = np.frombuffer(data, np.uint8)  # kept alive while the library reads it
        packet = self._library.packet()
        packet.bsl_data, packet.bsl, packet.pts = held.ctypes.data, len(data), pts
        yield from self._frames(packet)

    def finish(self) -> Iterator[Frame]:
        """Yield the frames that the session holds back. It may be fed again, from a start on."""
        while frames := list(self._frames(self._library.packet())):
            yield from frames

    def _frames(self, packet: Any) -> Iterator[Frame]:
        import torch

        with self._library._told(Refusal.FAILED):
            frames = [(frame.getPTS(), torch.from_dlpack(frame)) for frame in self._decoder.Decode(packet)]
        for pts, picture in frames:
            yield Frame(pts, picture.squeeze(-1) if picture.dim() == 3 else picture)


def _imported() -> Any:
    try:
        import_module("torch")  # imported now, because the sandboxed process cannot read files later
        return import_module("PyNvVideoCodec")
    except ModuleNotFoundError as error:
        said = "install PyNvVideoCodec beside a torch with CUDA"
        raise NvdecError(Refusal.NO_LIBRARY, f"{error.name} is not installed; {said}") from None
    except Exception as error:
        # importing it queries the driver, and raises RuntimeError or ImportError
        said = "; in a container NVIDIA_DRIVER_CAPABILITIES must name video"
        raise NvdecError(Refusal.NO_DRIVER, f"{str(error).splitlines()[0]}{said}") from error
