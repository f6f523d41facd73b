"""The costs of each stage, as the scenario says."""

from pathlib import Path

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.sim.costs.base import DecoderCosts, EngineCosts, Source, SourceKind
from vllm_omni_sched.sim.costs.decoders import CoreDecoder, NvdecDecoder
from vllm_omni_sched.sim.costs.efficiency import Efficiency
from vllm_omni_sched.sim.costs.hardware import DeviceKind
from vllm_omni_sched.sim.costs.measured import MeasuredCosts
from vllm_omni_sched.sim.costs.models import model
from vllm_omni_sched.sim.costs.roofline import RooflineCosts
from vllm_omni_sched.sim.scenario.stages import EncoderStage, EngineStage, VideoStage
from vllm_omni_sched.sim.work import Clip


def engine_costs(stage: EngineStage | EncoderStage, device: DeviceKind, folder: Path) -> EngineCosts:
    """Of an LLM and its encoder, or of the encoder alone.

    Raises:
        ConfigError: the model does not fit on its devices, or the calibration cannot be read; the message names the
            stage.
    """
    try:
        if stage.calibration is not None:
            return MeasuredCosts.read(folder / stage.calibration)
        memory = stage.gpu_memory_utilization if isinstance(stage, EngineStage) else 0.9
        assert stage.model is not None
        return RooflineCosts(model(stage.model), device, stage.devices, Efficiency(memory=memory))
    except ConfigError as error:
        raise ConfigError(f"stages.{stage.name}: {error}") from None


class GivenDecoder:
    """A decoder of which the scenario says what it does."""

    source = Source(SourceKind.ASSUMED, "the scenario's megapixels_per_second")

    def __init__(self, megapixels_per_second: float, piece_seconds: float) -> None:
        self._pixel_seconds = 1e-6 / megapixels_per_second
        self.piece_seconds = piece_seconds

    def frames_seconds(self, clip: Clip, frames: int) -> float:
        """In proportion to pixels."""
        return frames * clip.width * clip.height * self._pixel_seconds


def decoder_costs(stage: VideoStage, device: DeviceKind) -> DecoderCosts:
    """Of one decoder."""
    own: DecoderCosts = CoreDecoder() if stage.decoders == "cpu" else NvdecDecoder(device)
    if stage.megapixels_per_second is None:
        return own
    piece = own.piece_seconds if stage.piece_seconds is None else stage.piece_seconds
    return GivenDecoder(stage.megapixels_per_second, piece)
