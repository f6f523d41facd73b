"""A tiny LLaVA: CLIP tower, Llama, and a tokenizer whose every id is printable.

The weights are random but real: scaled so that each layer matters, and written to disk. (vLLM's own
`load_format="dummy"` draws from ±0.001, where neither the context nor an image ever changes the next token; comparing
tokens would then prove nothing.) One seed, so every process and every vLLM version gets the same model.
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

from dev.tiny_models.folder import write_once

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "<image>")
SEED = 20

SIZES: dict[str, int] = {
    "image_size": 56,
    "patch_size": 14,
    "tower_layers": 3,
    "tower_hidden": 64,
    "tower_heads": 4,
    "llm_layers": 2,
    "llm_hidden": 128,
    "llm_heads": 4,
    "max_position_embeddings": 131_072,
}

# One image takes 0.2 to 0.4 s on two cores: long enough to see what an encode does to the requests beside it.
SLOW_TOWER: dict[str, int] = {"image_size": 336, "tower_layers": 12, "tower_hidden": 384, "tower_heads": 6}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


def write_llava(out: Path, **sizes: int) -> Path:
    """Write the model into `out`; `sizes` override entries of `SIZES`.

    One image costs (image_size / patch_size)² tokens.
    """
    if unknown := sizes.keys() - SIZES.keys():
        raise TypeError(f"unknown size {sorted(unknown)[0]!r}; there are {', '.join(SIZES)}")
    chosen = SIZES | sizes
    return write_once(out, lambda folder: _write(folder, chosen), sources=[__file__], sizes=chosen)


def _write(folder: Path, sizes: dict[str, int]) -> None:
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    config = _config(tokenizer, sizes)
    config.save_pretrained(folder)
    _save_weights(folder, config)
    side = sizes["image_size"]
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": side},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": sizes["patch_size"],
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor, indent=2))
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2))


def _tokenizer() -> Any:
    """One id per printable character, the other ids made-up words: whatever a random model says can be read.

    Text is split into characters (one outside ASCII becomes `<unk>`); the words only ever come out, never go in.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    made_up = (f" {first}{second}" for first, second in itertools.product(syllables, syllables[::-3]))
    words = itertools.islice(made_up, VOCAB_SIZE - len(SPECIAL_TOKENS) - len(characters))
    vocab = {token: id_ for id_, token in enumerate([*SPECIAL_TOKENS, *characters, *words])}
    assert len(vocab) == VOCAB_SIZE

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _config(tokenizer: Any, sizes: dict[str, int]) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            image_size=sizes["image_size"],
            patch_size=sizes["patch_size"],
            num_hidden_layers=sizes["tower_layers"],
            hidden_size=sizes["tower_hidden"],
            intermediate_size=4 * sizes["tower_hidden"],
            num_attention_heads=sizes["tower_heads"],
            projection_dim=sizes["tower_hidden"],
        ),
        text_config=LlamaConfig(
            vocab_size=VOCAB_SIZE,
            num_hidden_layers=sizes["llm_layers"],
            hidden_size=sizes["llm_hidden"],
            intermediate_size=2 * sizes["llm_hidden"],
            num_attention_heads=sizes["llm_heads"],
            num_key_value_heads=sizes["llm_heads"],
            max_position_embeddings=sizes["max_position_embeddings"],
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(sizes["image_size"] // sizes["patch_size"]) ** 2,
        vision_feature_select_strategy="default",
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    return config


def _save_weights(folder: Path, config: Any) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlavaForConditionalGeneration

    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, weight in sorted(LlavaForConditionalGeneration(config).named_parameters()):
        weight = weight.detach()
        if weight.ndim >= 2:  # keep the variance of what passes through
            inputs = 1 if "embed_tokens" in name or "position_embedding" in name else weight[0].numel()
            weight.normal_(std=inputs**-0.5, generator=generator)
        elif "norm" in name and name.endswith("weight"):
            weight.fill_(1.0)
        else:
            weight.normal_(std=0.1, generator=generator)
        weights[_name_in_checkpoint(name)] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _name_in_checkpoint(name: str) -> str:
    """LLaVA's names on disk, which every vLLM reads; transformers renames its modules between releases."""
    for module, on_disk in (
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.language_model.", "language_model.model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("lm_head.", "language_model.lm_head."),
    ):
        if name.startswith(module):
            return on_disk + name.removeprefix(module).removeprefix("vision_model.")
    raise ValueError(f"no checkpoint name for {name}: transformers has renamed a module of LLaVA")
