"""Read the formats of weights and KV cache from the ``quantization_config`` of a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.configured.fields import Fields
from vllm_omni_sched.sim.costs.models import Precision, WeightFormat

_BY_BITS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round", "autoround", "auto_round", "inc")
_FP8 = ("fp8", "fbgemm_fp8", "ptpc_fp8")


def precision_of(tables: tuple[Fields, ...], weights: WeightFormat | None = None) -> Precision:
    """Return the formats of a checkpoint.

    Args:
        tables: the tables of the file that may have the ``quantization_config``, outermost first.
        weights: the format if the file has one that is not known, in the user's word.

    Raises:
        ConfigError: the format is not known, and ``weights`` is not given.
    """
    for fields in tables:
        for name in ("quantization_config", "compression_config"):
            if found := fields.table(name):
                config = Fields(found, f"{fields.where}, {name}")
                return Precision(_weights(config, weights), _kv_is_fp8(config))
    return Precision()


def _weights(config: Fields, word: WeightFormat | None) -> WeightFormat:
    try:
        return _format(config)
    except ConfigError as error:
        if word is not None:
            return word
        raise ConfigError(f"{error}: name the format of the weights with `plan --weights`; in a scenario, use a copy "
                          "of the file without it, for weights in bf16") from None  # fmt: skip


def _format(config: Fields) -> WeightFormat:
    method = config.word("quant_method").lower()
    inner = Fields(config.table("quantization"), config.where)
    algorithm = (inner.word("quant_algo") or config.word("quant_algo")).upper()
    if method in _FP8:
        return WeightFormat.FP8
    if method == "mxfp4":
        return WeightFormat.MXFP4
    if method in _BY_BITS:
        return _of_bits(config, "w_bit" if config.has("w_bit") else "bits")
    if method == "bitsandbytes":
        for name, found in (("load_in_4bit", WeightFormat.INT4), ("load_in_8bit", WeightFormat.INT8)):
            if config.flag(name):
                return found
    if method.startswith("modelopt") and algorithm:
        return _modelopt(config, algorithm)
    if method in ("compressed-tensors", "modelopt") and config.has("config_groups"):
        return _of_groups(config)
    raise ConfigError(f"{config.where}: the quant_method {method!r} is not known")


def _of_bits(config: Fields, name: str) -> WeightFormat:
    bits = config.count(name)
    if bits not in (4, 8):
        raise ConfigError(f"{config.where}: weights of {bits} bits are not known")
    return WeightFormat.INT4 if bits == 4 else WeightFormat.INT8


def _modelopt(config: Fields, algorithm: str) -> WeightFormat:
    if algorithm.startswith(("FP8", "MXFP8")):
        return WeightFormat.FP8
    if algorithm.startswith(("NVFP4", "W4A16_NVFP4")):
        return WeightFormat.NVFP4
    if algorithm.startswith(("W4A16", "W4A8", "INT4")):
        return WeightFormat.INT4
    if algorithm.startswith(("INT8", "W8A")):
        return WeightFormat.INT8
    raise ConfigError(f"{config.where}: the quant_algo {algorithm!r} is not known")


def _of_groups(config: Fields) -> WeightFormat:
    """Return the format of the weights of all groups; what activations and the KV cache have does not count."""
    found = set()
    for name, group in config.table("config_groups").items():
        if not isinstance(group, Mapping):
            raise ConfigError(f"{config.where}: the group {name!r} has no table of its weights")
        where = f"{config.where}, {name}"
        scheme = Fields(group, where)
        if weights := scheme.table("weights"):
            packed = scheme.word("format") or config.word("format")
            found.add(_of_group(Fields(weights, where), packed, bool(scheme.table("input_activations"))))
    if len(found) != 1:
        names = ", ".join(sorted(one.value for one in found)) or "none"
        raise ConfigError(f"{config.where}: its groups must have weights of one format, and have {names}")
    return found.pop()


def _of_group(weights: Fields, packed: str, with_activations: bool) -> WeightFormat:
    found, kind = _of_bits(weights, "num_bits"), weights.word("type")
    if kind == "float" and found is WeightFormat.INT4:
        nvidia = packed.startswith("nvfp4") or weights.get("group_size") == 16
        return WeightFormat.NVFP4 if nvidia else found  # else a scale for 32, as many bytes as with integers
    # FP8 weights with activations in bf16 are converted, as 8-bit integers are
    return WeightFormat.FP8 if kind == "float" and with_activations else found


def _kv_is_fp8(config: Fields) -> bool:
    inner = config.get("quantization")
    tables: tuple[Any, ...] = (config.get, inner.get) if isinstance(inner, Mapping) else (config.get,)
    for get in tables:
        scheme, algorithm = get("kv_cache_scheme"), get("kv_cache_quant_algo")
        if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
            return True
        if isinstance(algorithm, str) and algorithm.upper() == "FP8":
            return True
    return False
