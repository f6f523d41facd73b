"""Build the video decoders of a stage from the scenario."""

from vllm_omni_sched.sim.costs.base import DecoderCosts, Source, SourceKind
from vllm_omni_sched.sim.costs.choice import decoder_costs
from vllm_omni_sched.sim.scenario.stages import VideoStage
from vllm_omni_sched.sim.work import Clip


class GivenDecoder:
    """A decoder with the speed that the scenario sets."""

    source = Source(SourceKind.ASSUMED, "the scenario's megapixels_per_second")

    def __init__(self, megapixels_per_second: float, piece_seconds: float) -> None:
        self._pixel_seconds = 1e-6 / megapixels_per_second
        self.piece_seconds = piece_seconds

    def frames_seconds(self, clip: Clip, frames: int) -> float:
        """Return seconds in proportion to the pixels."""
        return frames * clip.width * clip.height * self._pixel_seconds


def decoder_of(stage: VideoStage, device: str) -> DecoderCosts:
    """Return the costs of one decoder.

    Raises:
        ConfigError: there is no such device, or it has no such decoders; the message names the stage.
    """
    own = decoder_costs(stage.name, stage.decoders, device)
    if stage.megapixels_per_second is None:
        return own
    piece = own.piece_seconds if stage.piece_seconds is None else stage.piece_seconds
    return GivenDecoder(stage.megapixels_per_second, piece)
