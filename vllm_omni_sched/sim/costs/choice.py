"""Choose the cost model that a scenario names."""

from collections.abc import Callable
from pathlib import Path

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.base import DecoderCosts, EngineCosts, pick
from vllm_omni_sched.sim.costs.decoders import CoreDecoder, NvdecDecoder
from vllm_omni_sched.sim.costs.hardware import device
from vllm_omni_sched.sim.costs.measured import MeasuredCosts
from vllm_omni_sched.sim.costs.models import model
from vllm_omni_sched.sim.costs.roofline import Efficiency, RooflineCosts


def engine_costs(
    stage: str,
    device_name: str,
    model_name: str | None = None,
    calibration: Path | None = None,
    devices: int = 1,
    efficiency: Efficiency | None = None,
) -> EngineCosts:
    """Return the costs of an engine: measured if there is a calibration, else by its roofline.

    Raises:
        ConfigError: neither or both of ``model_name`` and ``calibration`` are given, a name is unknown, the file is no
            calibration, or the model does not fit; the message names the stage.
    """
    if (model_name is None) == (calibration is None):
        raise ConfigError(f"stage {stage!r}: give it either 'model' or 'calibration'")
    try:
        if calibration is not None:
            return MeasuredCosts.read(calibration)
        return RooflineCosts(model(model_name or ""), device(device_name), devices, efficiency)
    except ConfigError as error:
        raise ConfigError(f"stage {stage!r}: {error}") from None


def decoder_costs(stage: str, decoders: str, device_name: str) -> DecoderCosts:
    """Return the costs of one decoder: a core for ``cpu``, an engine of the device for ``nvdec``.

    Raises:
        ConfigError: a name is unknown; the message names the stage.
    """
    try:
        known: dict[str, Callable[[], DecoderCosts]] = {
            "cpu": CoreDecoder,
            "nvdec": lambda: NvdecDecoder(device(device_name)),
        }
        return pick("decoders", decoders, known)()
    except ConfigError as error:
        raise ConfigError(f"stage {stage!r}: {error}") from None
