"""Define models by name: their shapes, and what follows from them: parameters, operations, bytes, the largest item.

The largest item is the one for which vLLM sizes the encoder cache and the encoder's budget at start: embeddings of the
largest item for a ``max_model_len``, by the model's ``ProcessingInfo`` in vLLM 0.30 to 0.33 with one item of each
modality. It follows the processor's limits, not the items of a workload.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from vllm_omni_sched.sim.costs.base import pick

LargestItem = Callable[[int], int]
"""Function from ``max_model_len`` to the embeddings of the largest item."""

_QWEN_PIXELS = 12_845_056
"""``max_pixels`` in preprocessor_config.json of Qwen2.5-VL; vLLM uses it for the frames of a video as well."""
_QWEN_FRAMES = 14
"""``_MAX_FRAMES_PER_VIDEO`` of qwen2_vl.py in vLLM."""


def qwen25_vl(max_model_len: int) -> int:
    """Return the embeddings of a video of 14 frames of ``max_pixels``, or of as many as the context holds.

    Two frames share embeddings. An image has as many as two frames.
    """
    frame_pair = _QWEN_PIXELS // 28**2
    pairs = max(min(max_model_len // frame_pair, _QWEN_FRAMES // 2), 1)
    return pairs * frame_pair


def tiles(per_tile: int, *, video: bool = True) -> LargestItem:
    """Return the rule of InternVL: a picture of 12 tiles and a thumbnail, or a video that fills the context beside
    one such picture, a tile for each frame."""

    def largest(max_model_len: int) -> int:
        picture = (12 + 1) * per_tile
        frames = max((max_model_len - picture) // per_tile, 1)
        return max(picture, frames * per_tile if video else 0)

    return largest


def no_items(max_model_len: int) -> int:
    """Return 0, the rule of a text-only model."""
    return 0


def fixed(embeds: int) -> LargestItem:
    """Return the rule of a model whose items all have the same number of embeddings."""
    return lambda max_model_len: embeds


BF16_BYTES = 2


@dataclass(frozen=True)
class LlmShape:
    """A decoder with grouped-query attention and a gated MLP, like those of Llama and Qwen2."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 128
    qkv_bias: bool = False
    tied: bool = False  # the embedding is also the output matrix

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of all layers, by which each token is multiplied."""
        query, keys = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + keys) + (query + keys if self.qkv_bias else 0)
        return self.layers * (attention + 3 * self.hidden * self.ffn + 2 * self.hidden) + self.hidden

    @property
    def head_parameters(self) -> int:
        """Return the parameters of the output matrix, by which each sampled token is multiplied."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return self.layer_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def operations_per_pair(self) -> int:
        """Return the operations of attention for one query and one key in all layers, for score and value."""
        return 4 * self.layers * self.heads * self.head_dim

    def kv_bytes_per_token(self, devices: int = 1) -> int:
        """Return the KV bytes of a token in bf16, on all devices together; a device has at least one key head."""
        return BF16_BYTES * 2 * self.layers * max(self.kv_heads, devices) * self.head_dim


@dataclass(frozen=True)
class TowerShape:
    """An encoder of images or audio, with the projector of its output to the LLM.

    ``patches_per_embed``: how many of its positions become one embedding. ``patch_inputs``: numbers in a patch.
    ``window_patches``: patches that a position sees in layers other than the ``full_layers`` (None: all are full).
    ``projector``: widths of the final MLP. ``other_parameters``: position table, convolutions.
    """

    layers: int
    hidden: int
    ffn: int
    patches_per_embed: int
    patch_inputs: int
    projector: tuple[int, ...]
    gated: bool = False
    full_layers: int | None = None
    window_patches: int = 0
    other_parameters: int = 0

    @property
    def parameters(self) -> int:
        """Return the number of all parameters, including the projector."""
        patches = self.patch_inputs * self.hidden
        return self.layers * self._layer_parameters + patches + self._projector_parameters + self.other_parameters

    @property
    def _projector_parameters(self) -> int:
        return sum((width + 1) * after for width, after in pairwise(self.projector))

    @property
    def _layer_parameters(self) -> int:
        matrices = 3 if self.gated else 2
        weights = 4 * self.hidden**2 + matrices * self.hidden * self.ffn
        return weights + 7 * self.hidden + (matrices - 1) * self.ffn  # biases, and the scales of two norms

    @property
    def _full_layers(self) -> int:
        return self.layers if self.full_layers is None else self.full_layers

    @property
    def operations_per_embed(self) -> float:
        """Return the operations per embedding without those that grow with the sequence."""
        per_patch = 2 * (self.layers * self._layer_parameters + self.patch_inputs * self.hidden)
        per_patch += 4 * (self.layers - self._full_layers) * self.hidden * self.window_patches
        return float(self.patches_per_embed * per_patch + 2 * self._projector_parameters)

    @property
    def operations_per_pair(self) -> float:
        """Return the operations of full attention for each pair of embeddings that see each other."""
        return 4.0 * self._full_layers * self.hidden * self.patches_per_embed**2


@dataclass(frozen=True)
class Encoding:
    """Encoding of items of one modality by a tower.

    ``sequence_embeds``: number of embeddings that a position sees: a tile, or a frame of a video; None: its whole
    item. ``frontend_seconds_per_embed``: CPU core time to prepare the input of one embedding.
    """

    tower: TowerShape
    frontend_seconds_per_embed: float
    sequence_embeds: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """An LLM with the encodings of its modalities.

    ``published_parameters``: the value on its card. ``max_model_len``: tokens of its context,
    from its configuration. ``largest_item``: embeddings of its largest item, if it accepts items.
    """

    name: str
    llm: LlmShape
    encodings: Mapping[str, Encoding]
    published_parameters: int
    max_model_len: int = 32768
    largest_item: LargestItem = no_items

    @property
    def parameters(self) -> int:
        """Return the parameters of the LLM, and of each tower once, even if several modalities share it."""
        towers = {encoding.tower for encoding in self.encodings.values()}
        return self.llm.parameters + sum(tower.parameters for tower in towers)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights in bf16."""
        return BF16_BYTES * self.parameters


# vLLM pull request 50411: Qwen2VLImageProcessor takes 12.2 ms for 1024 x 1024 pixels.
# Decoding such a JPEG of 249 kB takes Pillow 6.1 ms of one core of an AMD EPYC (measured).
PIXEL_SECONDS = (12.2e-3 + 6.1e-3) / 1024**2
_VIDEO_PIXEL_SECONDS = 12.2e-3 / 1024**2  # another stage decodes it
SOUND_SECONDS = 0.0125e-3  # of 40 ms of audio: assumed, half a per mille of real time is more than a spectrogram takes


def _qwen25_llm(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int = 152064) -> LlmShape:
    return LlmShape(layers, hidden, heads, kv_heads, ffn, vocab, qkv_bias=True, tied=hidden == 2048)


def _qwen25_pictures(ffn: int, hidden: int) -> dict[str, Encoding]:
    """Return the encodings of Qwen2.5-VL: 28 x 28 pixels are 4 patches and 1 embedding.

    A video has two frames in each embedding, and at most 768 embeddings in such
    a pair (``VIDEO_MAX_PIXELS`` of qwen-vl-utils). 4 of the 32 layers see the whole image, the others 8 x 8 patches.
    """
    tower = TowerShape(
        32, 1280, ffn, 4, 3 * 2 * 14 * 14, (5120, 5120, hidden), gated=True, full_layers=4, window_patches=64
    )
    return {
        "image": Encoding(tower, 28 * 28 * PIXEL_SECONDS),
        "video": Encoding(tower, 2 * 28 * 28 * _VIDEO_PIXEL_SECONDS, sequence_embeds=768),
    }


def _tiles(tower: TowerShape) -> dict[str, Encoding]:
    """Return the encodings of InternVL: tiles of 448 x 448 pixels, 256 embeddings each; a video frame is a tile."""
    image, video = (448 * 448 / 256 * seconds for seconds in (PIXEL_SECONDS, _VIDEO_PIXEL_SECONDS))
    return {"image": Encoding(tower, image, 256), "video": Encoding(tower, video, 256)}


def _small_vit(hidden: int) -> TowerShape:
    return TowerShape(24, 1024, 4096, 4, 3 * 14 * 14, (4096, hidden, hidden), other_parameters=1026 * 1024)


def _large_vit(hidden: int) -> TowerShape:
    return TowerShape(45, 3200, 12800, 4, 3 * 14 * 14, (12800, hidden, hidden), other_parameters=1026 * 3200)


def _models() -> Iterator[ModelShape]:
    # Shapes are those of `config.json` of each repository; parameters as Transformers counts them.
    small, large = _qwen25_llm(28, 3584, 28, 4, 18944), _qwen25_llm(80, 8192, 64, 8, 29568)
    for size, llm, ffn, parameters in (
        ("3b", _qwen25_llm(36, 2048, 16, 2, 11008, 151936), 3420, 3_754_622_976),
        ("7b", small, 3420, 8_292_166_656),
        ("32b", _qwen25_llm(64, 5120, 40, 8, 27648), 3456, 33_452_718_336),
        ("72b", large, 3456, 73_410_777_344),
    ):
        pictures = _qwen25_pictures(ffn, llm.hidden)
        yield ModelShape(f"qwen2.5-vl-{size}", llm, pictures, parameters, 128_000, qwen25_vl)

    sound = TowerShape(  # windows of 2 s are 100 positions of it, 50 embeddings
        32, 1280, 5120, 2, 128 * 3, (1280, 3584), full_layers=0, window_patches=100, other_parameters=3 * 1280**2
    )
    yield ModelShape(
        "qwen2.5-omni-7b",
        small,
        {**_qwen25_pictures(3420, 3584), "audio": Encoding(sound, SOUND_SECONDS)},
        8_931_813_888,  # of the thinker
        32_768,
        qwen25_vl,
    )

    clip = TowerShape(23, 1024, 4096, 1, 3 * 14 * 14, (1024, 4096, 4096), other_parameters=577 * 1024)
    yield ModelShape(
        "llava-1.5-7b",
        LlmShape(32, 4096, 32, 32, 11008, 32064),
        {"image": Encoding(clip, 336 * 336 / 576 * PIXEL_SECONDS, 576)},
        7_063_427_072,  # its last vision layer is not run
        4096,
        fixed(576),
    )

    internlm = LlmShape(32, 4096, 32, 8, 14336, 92553)
    yield ModelShape(
        # vLLM accepts no video for it: its tokenizer has no video token
        "internvl2.5-8b",
        internlm,
        _tiles(_small_vit(4096)),
        8_080_000_000,  # by its card
        32_768,
        tiles(256, video=False),
    )
    for size, llm, tower, parameters in (
        ("8b", _qwen25_llm(28, 3584, 28, 4, 18944, 151674), _small_vit(3584), 7_944_373_760),
        ("38b", _qwen25_llm(64, 5120, 40, 8, 27648, 151674), _large_vit(5120), 38_388_452_992),
        ("78b", _qwen25_llm(80, 8192, 64, 8, 29568, 151674), _large_vit(8192), 78_408_606_336),
    ):
        yield ModelShape(f"internvl3-{size}", llm, _tiles(tower), parameters, 32_768, tiles(256))


MODELS = {shape.name: shape for shape in _models()}


def model(name: str) -> ModelShape:
    """Return the shape of the model with that name.

    Raises:
        ConfigError: there is none, and the message names the nearest.
    """
    return pick("model", name, MODELS)
