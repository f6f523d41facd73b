"""Read the shape of a model from its ``config.json``, as Transformers writes it.

Understood are the families of `configured.families` and the towers of `configured.towers`: decoders with grouped-query
attention or with DeepSeek's latent attention (MLA), dense or with routed experts, with or without sliding windows.
What is not understood is refused by name: costs of a wrong shape would look as good as those of a right one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.costs.configured.checkpoint_format import precision_of
from vllm_omni_sched.sim.costs.configured.families import SIZES, Family, family
from vllm_omni_sched.sim.costs.configured.fields import Fields
from vllm_omni_sched.sim.costs.configured.towers import pictures, sound
from vllm_omni_sched.sim.costs.models import Encoding, LargestItem, ModelShape, WeightFormat, no_items


@dataclass(frozen=True)
class _Composite:
    """A ``model_type`` whose file has tables for its parts.

    ``text``, ``vision``, ``audio``: the ``model_type`` of a part whose table names none. ``inside``: the field with the
    decoder's table. ``flat``: older files have the decoder's fields beside the ``vision_config``. ``tied``: of a file
    that does not tell; None: as the decoder's family.
    """

    text: str
    vision: str = ""
    audio: str = ""
    inside: str = "text_config"
    flat: bool = False
    tied: bool | None = None


COMPOSITES = {
    "gemma3": _Composite("gemma3_text", "siglip_vision_model"),
    "internvl": _Composite("qwen2", "internvl_vision"),
    "internvl_chat": _Composite("qwen2", "intern_vit_6b", inside="llm_config"),
    "llama4": _Composite("llama4_text", "llama4_vision_model"),
    "llava": _Composite("llama", "clip_vision_model"),
    "mistral3": _Composite("mistral", "pixtral"),
    "qwen2_vl": _Composite("qwen2_vl_text", "qwen2_vl_vision", flat=True, tied=False),
    "qwen2_5_vl": _Composite("qwen2_5_vl_text", "qwen2_5_vl_vision", flat=True, tied=False),
    "qwen3_vl": _Composite("qwen3_vl_text", "qwen3_vl_vision", tied=False),
    "qwen3_vl_moe": _Composite("qwen3_vl_moe_text", "qwen3_vl_moe_vision", tied=False),
    "qwen2_5_omni_thinker": _Composite(
        "qwen2_5_omni_text", "qwen2_5_omni_vision_encoder", "qwen2_5_omni_audio_encoder", tied=False
    ),
    "qwen3_omni_moe_thinker": _Composite(
        "qwen3_omni_moe_text", "qwen3_omni_moe_vision_encoder", "qwen3_omni_moe_audio_encoder", tied=False
    ),
}
THINKERS = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}
_OUTER_DEFAULTS = {"mistral3": {"spatial_merge_size": 2}}
_TIED = "tie_word_embeddings"


def read_config(path: Path, name: str = "", weights: WeightFormat | None = None) -> ModelShape:
    """Return the shape of the model whose ``config.json`` this is, or lies in this folder.

    Args:
        name: of the model, for messages and commands; default: what the file says, or its folder.
        weights: the format of weights whose ``quantization_config`` is not known.

    Raises:
        ConfigError: the file cannot be read, lacks a field, or is of a model whose costs are not known; the message
            names file and field.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: a config.json is an object with the fields of a model")
    own = found.get("_name_or_path")
    default = own if isinstance(own, str) and own else file.resolve().parent.name
    return shape_of(found, name or default, str(file), weights)


def shape_of(
    config: Mapping[str, Any], name: str, where: str = "config.json", weights: WeightFormat | None = None
) -> ModelShape:
    """Return the shape of a model from the fields of its ``config.json``.

    Raises:
        ConfigError: a field is missing or wrong, or the model is of a kind whose costs are not known.
    """
    outer = Fields(config, where)
    tables: tuple[Fields, ...] = (outer,)
    if (thinker := THINKERS.get(outer.word("model_type"))) is not None:
        inner = {"model_type": thinker, **outer.table("thinker_config")}
        outer = Fields(inner, f"{where}, thinker_config")
        tables += (outer,)
    kind = outer.word("model_type")
    encodings: dict[str, Encoding] = {}
    largest: LargestItem = no_items
    if (parts := COMPOSITES.get(kind)) is not None:
        outer = Fields(outer.all(), outer.where, _OUTER_DEFAULTS.get(kind))
        text, known = _decoder_of(outer, parts)
        tables += (text,)
        llm = known.read(text)
        if vision := outer.table("vision_config"):
            encodings, largest = pictures(vision, outer, parts.vision, llm.hidden)
        if audio := outer.table("audio_config") if parts.audio else {}:
            encodings = {**encodings, "audio": sound(audio, outer.where, parts.audio, llm.hidden)}
    else:
        known = family(outer)
        text = _whole_file(outer.all(), where, known)
        llm = known.read(text)
    return ModelShape(
        name,
        llm,
        encodings,
        0,
        Source(SourceKind.PUBLISHED, f"{where} of {name}"),
        text.count("max_position_embeddings", 32_768),
        largest,
        precision_of(tables, weights),
    )


def _whole_file(table: Mapping[str, Any], where: str, known: Family) -> Fields:
    """Return the fields of a file that is a decoder by itself: it must have the sizes, or it is incomplete."""
    return Fields(table, where, {name: value for name, value in known.defaults.items() if name not in SIZES})


def _decoder_of(outer: Fields, parts: _Composite) -> tuple[Fields, Family]:
    """Return the fields and the family of the decoder in a file with several parts.

    Whether embeddings are tied is told by the outer table first, as in vLLM.
    """
    inner, where = outer.table(parts.inside), f"{outer.where}, {parts.inside}"
    if not inner and parts.flat:
        table = {**outer.all(), "model_type": parts.text}
        known = family(Fields(table, outer.where))
        return _whole_file({_TIED: parts.tied, **table}, outer.where, known), known
    if not inner:
        raise ConfigError(f"{outer.where}: the field {parts.inside!r} is missing, and the costs need it: copy it from "
                          "the config.json of the model's repository")  # fmt: skip
    told = outer.get(_TIED)
    table = {"model_type": parts.text, **({_TIED: parts.tied} if parts.tied is not None else {}), **inner}
    if told is not None:
        table[_TIED] = told
    known = family(Fields(table, where))
    return Fields(table, where, known.defaults), known
