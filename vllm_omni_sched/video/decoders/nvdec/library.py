"""The calls to PyNvVideoCodec, and the engines that it finds."""

from __future__ import annotations

import contextlib
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_omni_sched.config.errors import DecoderError
from vllm_omni_sched.video.decoders.nvdec.limits import EXACT, FORMATS, Limits, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType

    import torch

_MOST_ENGINES = 64  # of one GPU, more than any has
_BUSY = re.compile(r"out[ _]of[ _]memory|error code : 2\b", re.IGNORECASE)
"""Messages when another session does not fit; 2 is CUDA_ERROR_OUT_OF_MEMORY, of which the library gives the number."""


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
    """Wraps the used part of PyNvVideoCodec.

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
        with self._as_nvdec_error(Refusal.NO_DEVICE):
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
        with self._as_nvdec_error(Refusal.FAILED):
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
    def _as_nvdec_error(self, otherwise: Refusal) -> Iterator[None]:
        """Convert all errors of the library, whose exceptions have no common base, to `NvdecError`."""
        try:
            yield
        except Exception as error:
            unsupported = getattr(self._module, "PyNvVCExceptionUnsupported", ())
            refused = Refusal.CODEC if isinstance(error, unsupported) else otherwise
            reason = Refusal.BUSY if _BUSY.search(str(error)) else refused
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

        with self._library._as_nvdec_error(Refusal.FAILED):
            frames = [(frame.getPTS(), torch.from_dlpack(frame)) for frame in self._decoder.Decode(packet)]
        for pts, picture in frames:
            yield Frame(pts, picture.squeeze(-1) if picture.dim() == 3 else picture)


def _imported() -> Any:
    try:
        import_module("torch")  # imported now, because the sandboxed process cannot read files later
        return import_module("PyNvVideoCodec")
    except ModuleNotFoundError as error:
        raise NvdecError(
            Refusal.NO_LIBRARY, f"{error.name} is not installed; install PyNvVideoCodec and a torch with CUDA"
        ) from None
    except Exception as error:
        # importing it queries the driver, and raises RuntimeError or ImportError
        reason = str(error).splitlines()[0]
        raise NvdecError(
            Refusal.NO_DRIVER, f"{reason}; in a container, NVIDIA_DRIVER_CAPABILITIES must include video"
        ) from error


def gpus_of_engines(
    at_most: int | None = None, library: Callable[[], Library] = Library, gpus: Iterable[int] | None = None
) -> list[int]:
    """Return the GPU of each decoding engine of this machine; empty if NVDEC cannot be used.

    All first engines come before all second ones, so that the first few are spread over GPUs. The driver distributes
    the sessions of a GPU over its engines in turn. This loads the driver, which allocates memory on each GPU: call it
    in another process to avoid that.

    Args:
        at_most: engines to use of one GPU; None for all.
        library, gpus: replacements of PyNvVideoCodec and of all GPUs that CUDA shows.
    """
    try:
        found = library()
        if gpus is None:
            import torch

            gpus = range(torch.cuda.device_count())
    except (NvdecError, ImportError):
        return []
    counts = {gpu: min(_engines(found, gpu), at_most or _MOST_ENGINES) for gpu in gpus}
    ordered = sorted((number, gpu) for gpu, count in counts.items() for number in range(count))
    return [gpu for _, gpu in ordered]


def _engines(library: Library, gpu: int) -> int:
    """Return the most engines of a GPU that decode any supported codec; 0 if it does not answer."""
    counts = [0]
    for codec in EXACT:
        with contextlib.suppress(NvdecError):
            limits = library.limits(gpu, codec, next(iter(FORMATS)))
            counts.append(limits.engines if limits.supported else 0)
    return max(counts)
