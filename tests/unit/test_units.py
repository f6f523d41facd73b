"""Bytes are given in one way: as a whole number, or as text with a unit, in every option that is one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from vllm_omni_sched.config.load import load_config
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.config.units import UnitError, bytes_of
from vllm_omni_sched.connectors.auto import AutoOptions
from vllm_omni_sched.connectors.cuda_ipc.share import CudaIpcConnectorOptions
from vllm_omni_sched.connectors.named_routes import SharedMemoryExtra
from vllm_omni_sched.preprocess.options import PreprocessOptions
from vllm_omni_sched.sim.scenario.stages import EngineStage
from vllm_omni_sched.video.options import VideoOptions

pytestmark = pytest.mark.once

MODELS = (
    *(OmniSchedConfig, StageSchedConfig, VideoOptions, PreprocessOptions, SharedMemoryExtra, EngineStage),
    *(AutoOptions, CudaIpcConnectorOptions),
)
BYTES = re.compile(r"(^|_)bytes(_|$)|_pool_size$|^(window_size|segment|localbuf)$")


def options_in_bytes(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and type of all options of a model, and of those in it, that are numbers of bytes."""
    for name, field in model.model_fields.items():
        if BYTES.search(name):
            yield f"{path}{name}", Annotated[(field.annotation, *field.metadata, None)]
        for inner in models_in(field.annotation):
            yield from options_in_bytes(inner, f"{path}{name}.")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


FOUND = {f"{model.__name__}.{path}": kind for model in MODELS for path, kind in options_in_bytes(model)}


def test_all_places_were_looked_at():
    assert {
        "OmniSchedConfig.spill_max_bytes",
        "StageSchedConfig.pools.image_pool_size",
        "StageSchedConfig.graph.partition.devices.memory_bytes",
        "AutoOptions.arena.text.initial_bytes",
        "AutoOptions.tiers.disk.max_bytes",
        "AutoOptions.compression.edges.min_bytes",
        "CudaIpcConnectorOptions.arena.ring_bytes",
        "VideoOptions.max_input_bytes",
    } <= FOUND.keys()


@pytest.mark.parametrize("option", FOUND)
def test_every_option_in_bytes_takes_numbers_and_texts(option):
    kind = TypeAdapter(FOUND[option])
    wrap = (lambda value: {"0->1": value}) if "dict" in str(FOUND[option]) else (lambda value: value)
    inside = [number for number in (1 << 20, 1 << 30) if _accepts(kind, wrap(number))]
    assert inside, "neither a megabyte nor a gigabyte is within its bounds"
    for number in inside:
        text = {1 << 20: "1MiB", 1 << 30: "1 gb"}[number]
        assert kind.validate_python(wrap(text)) == wrap(number)
    with pytest.raises(ValidationError, match="'4 GBytes' is not a size: give bytes, or a number with KB"):
        kind.validate_python(wrap("4 GBytes"))


def _accepts(kind: TypeAdapter, value: object) -> bool:
    try:
        kind.validate_python(value)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("512", 512), ("64KB", 65536), ("64 KiB", 65536), ("1.5GB", 3 << 29), ("4g", 4 << 30), ("1TB", 1 << 40)],
)
def test_units_are_powers_of_1024(text, number):
    assert bytes_of(text) == number


@pytest.mark.parametrize("text", ["", "GB", "4 GBytes", "-1MB", "1e6", "1_000"])
def test_other_texts_are_refused(text):
    with pytest.raises(UnitError, match="is not a size"):
        bytes_of(text)


def test_the_options_of_an_engine_are_read_so():
    assert load_config({"omni_sched": {"spill_max_bytes": "4GB"}}).spill_max_bytes == 4 << 30
