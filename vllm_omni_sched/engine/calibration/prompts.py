"""Makes prompts of a given size for any model."""

from typing import Any

import numpy as np

from vllm_omni_sched.config.errors import ConfigError

_LARGEST_SIDE = 1024  # pixels: the largest image that a model takes may be far above what people send


class Prompts:
    """Makes text prompts, and prompts with synthetic images of one size.

    Args:
        config: vLLM's configuration of the engine.
        image_size: width and height in pixels; None for the largest size that the model's processor names, up to 1024
            either way.
        seed: of the random lengths and pixels.
    """

    def __init__(self, config: Any, image_size: tuple[int, int] | None, seed: int) -> None:
        self._config = config
        self._random = np.random.default_rng(seed)
        self.image_size = image_size
        self._tokens = self._word_tokens()
        self._dummy: Any = None
        self.max_images = 0
        if config.model_config.is_multimodal_model:
            self._find_images()

    def tokens(self, length: int) -> dict[str, Any]:
        """Return a prompt of exactly ``length`` tokens, which the front end need not tokenize."""
        return {"prompt_token_ids": [self._tokens[i % len(self._tokens)] for i in range(length)]}

    def about(self, length: int) -> int:
        """Return a random length within a fifth of ``length``: prompts of one repeated length run faster than
        others.
        """
        return max(round(length * self._random.uniform(0.8, 1.2)), 1)

    def text(self, words: int) -> dict[str, Any]:
        """Return a text prompt of so many words, which the front end has to tokenize."""
        return {"prompt": " ".join(["word"] * words)}

    def images(self, number: int) -> dict[str, Any]:
        """Return a prompt of ``number`` different images of noise."""
        from PIL import Image

        assert self.image_size is not None, "the model takes no images"
        width, height = self.image_size
        drawn = [
            Image.fromarray(self._random.integers(0, 255, (height, width, 3), dtype=np.uint8)) for _ in range(number)
        ]
        text = self._dummy.get_dummy_text({"image": number})
        return {"prompt": text, "multi_modal_data": {"image": drawn}}

    def _word_tokens(self) -> list[int]:
        from vllm.tokenizers import cached_tokenizer_from_config

        found: list[int] = cached_tokenizer_from_config(self._config.model_config).encode("word word")[-2:]
        return found

    def _find_images(self) -> None:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        processor = MULTIMODAL_REGISTRY.create_processor(self._config.model_config)
        allowed = processor.info.allowed_mm_limits.get("image", 0)
        if not allowed:
            return
        self.max_images = allowed
        self._dummy = processor.dummy_inputs
        if self.image_size is not None:
            return
        length = self._config.model_config.max_model_len
        made = self._dummy.get_dummy_mm_data(length, {"image": 1}, {}).get("image")
        if not made or not hasattr(made[0], "size"):
            raise ConfigError("the model's processor does not name an image size: pass --image-size WIDTHxHEIGHT")
        width, height = made[0].size
        self.image_size = min(width, _LARGEST_SIDE), min(height, _LARGEST_SIDE)
