"""Every number among the options has an upper bound, and what is beyond it is an error that names the option."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from vllm_omni_sched.connectors.arena.options import ArenaOptions, AudioPool, ImagePool, PoolOptions, TextPool
from vllm_omni_sched.connectors.auto import AutoOptions, ForeignOptions
from vllm_omni_sched.connectors.compression.options import CompressionOptions, EdgeOptions
from vllm_omni_sched.connectors.cuda_ipc.share import CudaIpcConnectorOptions
from vllm_omni_sched.connectors.disk import DiskOptions
from vllm_omni_sched.connectors.mooncake import MooncakeOptions
from vllm_omni_sched.connectors.tiers import TiersOptions
from vllm_omni_sched.connectors.watch import WatchOptions

MODELS: list[type[BaseModel]] = [
    *(ArenaOptions, TextPool, ImagePool, AudioPool, PoolOptions, AutoOptions, CompressionOptions, EdgeOptions),
    *(CudaIpcConnectorOptions, DiskOptions, ForeignOptions, MooncakeOptions, TiersOptions),
    WatchOptions,
]


def numbers() -> Iterator[tuple[type[BaseModel], str, type]]:
    for model in MODELS:
        for name, field in model.model_fields.items():
            annotation = field.annotation
            union = get_origin(annotation) in (Union, types.UnionType)
            kinds = get_args(annotation) if union else (annotation,)
            for kind in kinds:
                kind = get_args(kind)[0] if get_origin(kind) not in (None, dict, list) and get_args(kind) else kind
                if kind in (int, float):
                    yield model, name, kind


@pytest.mark.parametrize(("model", "option", "kind"), list(numbers()))
def test_a_number_beyond_all_bounds_is_an_error_that_names_it(model: type[BaseModel], option: str, kind: type) -> None:
    wrong: list[Any] = [1 << 63, 1 << 80, -(1 << 63)]
    wrong += [1e300, float("inf"), float("nan")] if kind is float else []
    for value in wrong:
        with pytest.raises(ValidationError) as raised:
            model.model_validate({option: kind(value)})
        assert (option,) in [error["loc"] for error in raised.value.errors()]


def test_all_numbers_are_looked_at() -> None:
    assert len(list(numbers())) > 30
