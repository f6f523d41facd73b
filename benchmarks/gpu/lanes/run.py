"""One turn of one variant on the GPU."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.gpu.lanes.models import HIDDEN, Decoder, VisionTower
from benchmarks.gpu.lanes.report import Sample
from benchmarks.gpu.lanes.variants import Encoder, Variant
from vllm_omni_sched.lanes import CudaDevice, Job, StreamLane

Clock = Callable[[], float]
IN_FLIGHT = 2  # encodes handed over at once, so that the device never waits for the next


@dataclass
class Load:
    """What is run: both models and their inputs."""

    decoder: Decoder
    tower: VisionTower
    images: torch.Tensor  # pinned
    batch: int

    @torch.inference_mode()
    def encode(self, images: torch.Tensor, pause: Callable[[], None]) -> torch.Tensor:
        embeddings: torch.Tensor = self.tower(images, pause)
        return embeddings


class Step(Protocol):
    """Runs one decode step on a stream."""

    def on_stream(self) -> AbstractContextManager[Any]: ...

    def __call__(self) -> None: ...


class DecodeStep:
    """A captured decode step, replayed as an engine does: launch, copy the tokens, wait for them."""

    def __init__(self, load: Load, prior: bool) -> None:
        least, greatest = torch.cuda.Stream.priority_range()
        # Nodes keep the priority of the stream they are captured on.
        capture = torch.cuda.Stream(priority=greatest if prior else least)
        self._stream = capture if prior else torch.cuda.default_stream()
        self._hidden = torch.randn(load.batch, HIDDEN, dtype=torch.bfloat16, device="cuda")  # the graph reads it
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.inference_mode():
            with torch.cuda.stream(capture):
                for _ in range(3):
                    load.decoder(self._hidden)
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph, stream=capture):
                self._tokens = load.decoder(self._hidden)
        self._on_host = torch.empty(load.batch, dtype=self._tokens.dtype, pin_memory=True)
        self._done = torch.cuda.Event()

    def on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def __call__(self) -> None:
        with self.on_stream():
            self._graph.replay()
            self._on_host.copy_(self._tokens, non_blocking=True)
            self._done.record()
        self._done.synchronize()


class Feeder:
    """What keeps an encoder busy; this one keeps none. ``images`` have been encoded so far."""

    images = 0

    def tick(self) -> None:
        """Between two decode steps."""

    def close(self) -> None:
        """End, with nothing left on the device."""


class StreamFeeder(Feeder):
    """A thread that keeps the stream of a `CudaDevice` busy with encodes."""

    def __init__(self, load: Load, device: CudaDevice) -> None:
        self._load, self._device = load, device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        launched: deque[Any] = deque()
        with self._device.lane_stream():
            while not self._stop.is_set():
                self._load.encode(self._load.images, _no_pause)
                launched.append(self._device.mark())
                if len(launched) >= IN_FLIGHT:
                    launched.popleft().synchronize()
                    self.images += len(self._load.images)
            self._device.mark().synchronize()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class LaneFeeder(Feeder):
    """Keeps a `StreamLane` busy, polled between decode steps as by an engine."""

    def __init__(self, load: Load, device: CudaDevice, share: float) -> None:
        self._load = load
        self._lane = StreamLane(load.encode, IN_FLIGHT, device=device)
        self._lane.set_share(share)
        self._submitted = 0
        self.tick()

    def tick(self) -> None:
        for done in self._lane.poll():
            if done.error is not None:
                raise done.error
            self.images += len(self._load.images)
        while self._lane.held < IN_FLIGHT:
            self._lane.submit(Job(str(self._submitted), self._load.images))
            self._submitted += 1

    def close(self) -> None:
        self._lane.close(30.0)


class InStep(Feeder):
    """Runs an encode before each decode step, on its stream."""

    def __init__(self, load: Load, step: Step) -> None:
        self._load, self._step = load, step

    def tick(self) -> None:
        with self._step.on_stream():
            self._load.encode(self._load.images, _no_pause)
        self.images += len(self._load.images)

    def close(self) -> None:
        torch.cuda.synchronize()


def run(
    variant: Variant, load: Load, step: Step, seconds: float, warm_up: float, clock: Clock = time.perf_counter
) -> Sample:
    """Run both sides for ``warm_up`` and then ``seconds``, and measure the latter.

    Raises:
        LaneError: this machine has no multiprocessors to set apart, or an encode failed.
    """
    feeder = _feeder(variant, load, step)
    try:
        _decode(variant, step, feeder, warm_up, clock)
        images, started = feeder.images, clock()
        gaps = _decode(variant, step, feeder, seconds, clock)
        return Sample(gaps, (feeder.images - images) / (clock() - started))
    finally:
        feeder.close()


def _feeder(variant: Variant, load: Load, step: Step) -> Feeder:
    device = torch.device("cuda")
    if variant.encoder is Encoder.IN_STEP:
        return InStep(load, step)
    if variant.encoder is Encoder.STREAM:
        return StreamFeeder(load, CudaDevice(device, variant.sms))
    if variant.encoder is Encoder.LANE:
        return LaneFeeder(load, CudaDevice(device, variant.sms), variant.share)
    return Feeder()


def _decode(variant: Variant, step: Step, feeder: Feeder, seconds: float, clock: Clock) -> list[float]:
    """Seconds between the tokens; none where nothing decodes."""
    until = clock() + seconds
    if not variant.decodes:
        time.sleep(seconds)
        return []
    with step.on_stream():
        gaps, last = [], clock()
        while last < until:
            feeder.tick()
            step()
            now = clock()
            gaps.append(now - last)
            last = now
    return gaps


def _no_pause() -> None:
    pass
