"""Read towers of known kinds, with the values that their classes in Transformers take for missing fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.configured.fields import Fields
from vllm_omni_sched.sim.costs.models import (
    PIXEL_SECONDS,
    SOUND_SECONDS,
    Encoding,
    LargestItem,
    TowerShape,
    fixed,
    qwen25_vl,
    tiles,
)

_Read = tuple[dict[str, Encoding], LargestItem]
_TowerRule = Callable[[Fields, Fields, int], _Read]
"""Function from the fields of a tower, those of the table that has it, and the LLM's width to the encodings."""

_LLAMA4_TILES = 16
"""``max_patches`` of Llama 4's image processor; a thumbnail comes with them."""


def _qwen(vision: Fields, outer: Fields, hidden: int) -> _Read:
    """Return the tower of Qwen2-VL, Qwen2.5-VL or Qwen3-VL, by itself or in a thinker."""
    first = vision.word("model_type") == "qwen2_vl_vision"  # its 'hidden_size' is that of the LLM
    width = vision.count("embed_dim" if first else "hidden_size")
    ffn = vision.count("mlp_ratio", 4) * width if first else vision.count("intermediate_size")
    merge, patch = vision.count("spatial_merge_size", 2), vision.side("patch_size", 14)
    merged, layers = merge * merge, vision.count("depth")
    full = {at for at in vision.numbers("fullatt_block_indexes") if at < layers}
    window = (vision.number("window_size", 0) // patch) ** 2
    mergers = 1 + len(set(vision.numbers("deepstack_visual_indexes")))
    entry = width * merged
    one = (entry + 1) * entry + (entry + 1) * hidden
    tower = TowerShape(
        layers,
        width,
        ffn,
        merged,
        3 * vision.side("temporal_patch_size", 2) * patch * patch,
        (entry, entry, hidden),
        gated=vision.word("hidden_act") == "silu",
        full_layers=len(full) if full else None,
        window_patches=window if full else 0,
        other_parameters=(mergers - 1) * one + vision.number("num_position_embeddings", 0) * width,
    )
    pixels = merged * patch * patch
    return {
        "image": Encoding(tower, pixels * PIXEL_SECONDS),
        "video": Encoding(tower, 2 * pixels * PIXEL_SECONDS, sequence_embeds=768),
    }, qwen25_vl


def _square(vision: Fields) -> tuple[int, int, int, int]:
    """Return layers, width, pixels of a patch's side, and pixels of an image's side."""
    patch, size = vision.side("patch_size"), vision.side("image_size")
    if size < patch:
        raise ConfigError(f"{vision.where}: 'image_size', {size}, must be at least 'patch_size', {patch}")
    return vision.count("num_hidden_layers"), vision.count("hidden_size"), patch, size


def _embeds(vision: Fields, patches: int, ratio: float, name: str) -> tuple[int, int]:
    """Return the embeddings of an image or tile, and the patches that become one of them."""
    embeds = round(patches * ratio**2)
    if not embeds:
        raise ConfigError(f"{vision.where}: {name!r} leaves no embedding of {patches} patches: correct it")
    return embeds, max(1, patches // embeds)


def _llava(vision: Fields, outer: Fields, hidden: int) -> _Read:
    """Return CLIP or SigLIP up to the layer whose output LLaVA takes, with an MLP to the LLM."""
    layers, width, patch, size = _square(vision)
    layer = outer.get("vision_feature_layer")
    taken = layer if layer is not None else -2
    if isinstance(taken, bool) or not isinstance(taken, int) or not -layers <= taken <= layers or taken == 0:
        raise ConfigError(f"{outer.where}: 'vision_feature_layer' must be a whole number from -{layers} to {layers}, "
                          "and not 0: the costs know towers of which one layer is taken")  # fmt: skip
    patches = (size // patch) ** 2
    clip, whole = vision.word("model_type") == "clip_vision_model", outer.word("vision_feature_select_strategy")
    embeds = max(1, patches + (clip if whole == "full" else clip - 1))
    tower = TowerShape(
        taken if taken > 0 else layers + 1 + taken,
        width,
        vision.count("intermediate_size"),
        1,
        3 * patch * patch,
        (width, hidden, hidden),
        other_parameters=(patches + clip) * width,
    )
    return {"image": Encoding(tower, size * size / embeds * PIXEL_SECONDS, embeds)}, fixed(embeds)


def _gemma3(vision: Fields, outer: Fields, hidden: int) -> _Read:
    """Return SigLIP, whose patches are averaged to ``mm_tokens_per_image``."""
    layers, width, patch, size = _square(vision)
    patches, embeds = (size // patch) ** 2, outer.count("mm_tokens_per_image", 256)
    if embeds > patches:
        raise ConfigError(f"{outer.where}: 'mm_tokens_per_image', {embeds}, must be at most the {patches} patches of "
                          "an image")  # fmt: skip
    tower = TowerShape(
        layers,
        width,
        vision.count("intermediate_size"),
        patches // embeds,
        3 * patch * patch,
        (width, hidden),
        other_parameters=patches * width,
    )
    return {"image": Encoding(tower, size * size / embeds * PIXEL_SECONDS, embeds)}, fixed(embeds)


def _internvl(vision: Fields, outer: Fields, hidden: int) -> _Read:
    """Return InternViT, which encodes tiles; several patches become an embedding by ``downsample_ratio``."""
    layers, width, patch, size = _square(vision)
    patches = (size // patch) ** 2
    embeds, merged = _embeds(vision, patches, outer.fraction("downsample_ratio", 0.5), "downsample_ratio")
    tower = TowerShape(
        layers,
        width,
        vision.count("intermediate_size"),
        merged,
        3 * patch * patch,
        (width * merged, hidden, hidden),
        other_parameters=(patches + 2) * width,
    )
    return {"image": Encoding(tower, size * size / embeds * PIXEL_SECONDS, embeds)}, tiles(embeds, video=False)


def _llama4(vision: Fields, outer: Fields, hidden: int) -> _Read:
    """Return the tower of Llama 4, which encodes tiles."""
    layers, width, patch, size = _square(vision)
    patches = (size // patch) ** 2
    embeds, merged = _embeds(vision, patches, vision.fraction("pixel_shuffle_ratio", 0.5), "pixel_shuffle_ratio")
    inner, last = vision.count("projector_input_dim"), vision.count("projector_output_dim")
    tower = TowerShape(
        layers,
        width,
        vision.count("intermediate_size"),
        merged,
        3 * patch * patch,
        (width * merged, inner, last, hidden),
        other_parameters=(patches + 2) * width,
    )
    encoding = Encoding(tower, size * size / embeds * PIXEL_SECONDS, embeds)
    return {"image": encoding}, fixed((_LLAMA4_TILES + 1) * embeds)


def _pixtral(vision: Fields, outer: Fields, hidden: int) -> _Read:
    """Return Pixtral's tower, whose images keep their size up to ``image_size``; Mistral 3 merges patches."""
    layers, width, patch, size = _square(vision)
    merge = outer.count("spatial_merge_size", 1)
    if merge * patch > size:
        raise ConfigError(f"{outer.where}: 'spatial_merge_size', {merge}, leaves no embedding of an image of {size} "
                          "pixels: correct it")  # fmt: skip
    entry = (width * merge * merge, width) if merge > 1 else (width,)
    tower = TowerShape(
        layers,
        width,
        vision.count("intermediate_size"),
        merge * merge,
        3 * patch * patch,
        (*entry, hidden, hidden),
        gated=True,
    )
    return {"image": Encoding(tower, (merge * patch) ** 2 * PIXEL_SECONDS)}, fixed((size // (merge * patch)) ** 2)


_CLIP = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "patch_size": 32,
}  # fmt: skip
_QWEN3 = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "num_position_embeddings": 2304, "deepstack_visual_indexes": (8, 16, 24),
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_QWEN25 = {
    "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": (7, 15, 23, 31), "hidden_act": "silu",
}  # fmt: skip
_QWEN2 = {
    "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "hidden_act": "quick_gelu",
}  # fmt: skip
_INTERNVIT = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "image_size": 448, "patch_size": 14,
}  # fmt: skip
TOWERS: Mapping[str, tuple[_TowerRule, Mapping[str, Any]]] = {
    "qwen2_vl_vision": (_qwen, _QWEN2),
    "qwen2_5_vl_vision": (_qwen, _QWEN25),
    "qwen2_5_omni_vision_encoder": (_qwen, _QWEN25),
    "qwen3_vl_vision": (_qwen, _QWEN3),
    "qwen3_vl_moe_vision": (_qwen, _QWEN3),
    "qwen3_omni_moe_vision_encoder": (_qwen, _QWEN3),
    "clip_vision_model": (_llava, _CLIP),
    "siglip_vision_model": (_llava, {**_CLIP, "patch_size": 16}),
    "intern_vit_6b": (_internvl, _INTERNVIT),
    "internvl_vision": (_internvl, _INTERNVIT),
    "llama4_vision_model": (
        _llama4,
        {
            "hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "image_size": 448, "patch_size": 14,
            "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096, "projector_output_dim": 4096,
        },
    ),
    "pixtral": (
        _pixtral,
        {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "image_size": 1024,
            "patch_size": 16,
        },
    ),
}  # fmt: skip
"""Rules and defaults by the ``model_type`` of the tower's table."""
_SHORT = {
    "qwen2_vl": "qwen2_vl_vision", "qwen2_5_vl": "qwen2_5_vl_vision", "qwen3_vl": "qwen3_vl_vision",
    "qwen3_vl_moe": "qwen3_vl_moe_vision",
}  # fmt: skip
"""Names that published files have for towers."""


def pictures(vision: Mapping[str, Any], outer: Fields, kind: str, hidden: int) -> _Read:
    """Return the encodings of a ``vision_config``, and the rule of the largest item.

    Args:
        outer: fields of the table that has it.
        kind: its ``model_type`` if it names none.
        hidden: width of the LLM.

    Raises:
        ConfigError: the tower is not known, or a field is missing or wrong.
    """
    where = f"{outer.where}, vision_config"
    name = Fields(vision, where).word("model_type") or kind
    name = _SHORT.get(name, name)
    if name not in TOWERS:
        raise ConfigError(f"{where}: the tower of the model_type {name!r} is not known: plan for text alone with a "
                          "copy of the file without 'vision_config', or measure an engine with `vllm-omni-sched "
                          "calibrate`. "
                          f"Known are {', '.join(sorted(TOWERS))}")  # fmt: skip
    rule, defaults = TOWERS[name]
    if rule is _llava and outer.get("model_type") == "gemma3":
        rule = _gemma3
    return rule(Fields({**vision, "model_type": name}, where, defaults), outer, hidden)


_SOUND = {"encoder_layers": 32, "encoder_ffn_dim": 5120, "d_model": 1280, "num_mel_bins": 128}


def sound(audio: Mapping[str, Any], where: str, kind: str, hidden: int) -> Encoding:
    """Return the encoding of an ``audio_config`` of Qwen2.5-Omni or Qwen3-Omni.

    The convolutions of Qwen3-Omni before its last matrix are not counted as operations; they are about a fifth.

    Raises:
        ConfigError: the tower is not known, or a field is missing or wrong.
    """
    fields = Fields(audio, f"{where}, audio_config", _SOUND)
    name = fields.word("model_type") or kind
    layers, width, ffn, mel = (fields.count(one) for one in ("encoder_layers", "d_model", "encoder_ffn_dim",
                                                             "num_mel_bins"))  # fmt: skip
    if name == "qwen2_5_omni_audio_encoder":  # 100 positions of 20 ms see each other, two become an embedding
        window = fields.count("n_window", 100)
        tower = TowerShape(
            layers, width, ffn, 2, mel * 3, (width, hidden), full_layers=0, window_patches=window,
            other_parameters=3 * width**2,
        )  # fmt: skip
        return Encoding(tower, SOUND_SECONDS)
    if name == "qwen3_omni_moe_audio_encoder":  # three convolutions make a position of 80 ms
        channels, frames = fields.count("downsample_hidden_size", 480), fields.count("n_window_infer", 800)
        tower = TowerShape(
            layers, width, ffn, 1, channels * -(-mel // 8), (width, width, hidden), full_layers=0,
            window_patches=-(-frames * 13 // 100), other_parameters=channels * 9 * (2 * channels + 1),
        )  # fmt: skip
        return Encoding(tower, 2 * SOUND_SECONDS)
    raise ConfigError(f"{fields.where}: the tower of the model_type {name!r} is not known: plan without sound with a "
                      "copy of the file without 'audio_config', or measure an engine with `vllm-omni-sched "
                      "calibrate`")  # fmt: skip
