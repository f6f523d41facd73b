"""Where the frames of a video are put together: on a device, or on the host with a reason. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

PROCESSORS = frozenset({"Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"})
"""Video processors of Hugging Face that were checked to work where the frames are, and to give the same there: their
operations are torch's. Qwen2-VL, Qwen2.5-VL, Qwen2.5-Omni and Qwen3-Omni have the first, Qwen3-VL and Qwen3.5 the
second."""


class FramesReason(str, Enum):
    """Reason why the frames of a video stay on a device, or are copied to the host."""

    ON_DEVICE = "on_device"  # they stay there; with all other reasons, they go to the host
    OFF = "off"  # option `device_bytes` is 0
    NO_ENGINES = "device_no_engines"  # no GPU decodes here
    PROCESSOR_ON_HOST = "device_processor_on_host"  # vLLM preprocesses on the host
    PROCESSOR_UNKNOWN = "device_processor_unknown"  # the model's video processor is not known to work on a device
    TRANSPORT = "device_transport"  # vLLM sends tensors to the engine through the host
    NO_MEMORY = "device_no_memory"  # the device has too little memory for `device_bytes`, or it cannot be shared
    TOO_LARGE = "device_too_large"  # the frames of this video are larger than `device_bytes`
    REFUSED = "device_refused"  # a GPU does not decode this video, or failed at it


@dataclass(frozen=True)
class Server:
    """What a server does with the frames of videos.

    Attributes:
        device_bytes: the option.
        engines: number of decoding engines of GPUs.
        processor: name of the class of the model's video processor; None if unknown.
        processor_device: type of the device on which vLLM preprocesses, such as ``cuda``; None for the host.
        transport: how vLLM sends tensors from its API process to the engine.
    """

    device_bytes: int
    engines: int
    processor: str | None
    processor_device: str | None
    transport: str | None


WHAT_TO_DO = {
    FramesReason.NO_ENGINES: "no GPU decodes videos here; `vllm-omni-sched doctor` tells why",
    FramesReason.PROCESSOR_ON_HOST: "vLLM preprocesses on the host; start an encode-only instance with "
    "--mm-processor-device cuda, and without 'preprocess.processes'",
    FramesReason.PROCESSOR_UNKNOWN: f"the model's video processor is none of {', '.join(sorted(PROCESSORS))}",
    FramesReason.TRANSPORT: "vLLM sends tensors to the engine through the host; add --mm-tensor-ipc torch_shm",
}
"""What the operator has to know where frames cannot stay on a device of a server."""


def of_server(server: Server) -> FramesReason:
    """Return whether frames can stay on a device of this server at all.

    1. Only if the option gives them memory, and there is an engine to decode on.
    2. Only if what reads them works on the device: vLLM's preprocessing, by a processor of operations of torch.
    3. Only if what that makes goes to the engine as a handle, because the copies would only move otherwise.
    """
    if not server.device_bytes:
        return FramesReason.OFF
    if not server.engines:
        return FramesReason.NO_ENGINES
    if server.processor_device != "cuda":
        return FramesReason.PROCESSOR_ON_HOST
    if server.processor not in PROCESSORS:
        return FramesReason.PROCESSOR_UNKNOWN
    return FramesReason.ON_DEVICE if server.transport == "torch_shm" else FramesReason.TRANSPORT


def of_video(nbytes: int, device_bytes: int) -> FramesReason:
    """Return whether the frames of a video fit: with others they wait for room, alone they must have it."""
    return FramesReason.ON_DEVICE if nbytes <= device_bytes else FramesReason.TOO_LARGE
