"""Define models by name, with the shapes in their published configurations."""

from collections.abc import Iterator

from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.costs.largest import fixed, qwen25_vl, tiles
from vllm_omni_sched.sim.costs.registry import pick
from vllm_omni_sched.sim.costs.shapes import Encoding, LlmShape, ModelShape, TowerShape

# vLLM pull request 50411: Qwen2VLImageProcessor takes 12.2 ms for 1024 x 1024 pixels.
# Decoding such a JPEG of 249 kB takes Pillow 6.1 ms of one core of an AMD EPYC (measured).
PIXEL_SECONDS = (12.2e-3 + 6.1e-3) / 1024**2
_VIDEO_PIXEL_SECONDS = 12.2e-3 / 1024**2  # another stage decodes it
_SOUND_SECONDS = 0.0125e-3  # of 40 ms of audio: assumed, half a per mille of real time is more than a spectrogram takes


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
    def card(repository: str) -> Source:
        return Source(SourceKind.PUBLISHED, f"config.json of {repository}; parameters as Transformers counts them")

    small, large = _qwen25_llm(28, 3584, 28, 4, 18944), _qwen25_llm(80, 8192, 64, 8, 29568)
    for size, llm, ffn, parameters in (
        ("3b", _qwen25_llm(36, 2048, 16, 2, 11008, 151936), 3420, 3_754_622_976),
        ("7b", small, 3420, 8_292_166_656),
        ("32b", _qwen25_llm(64, 5120, 40, 8, 27648), 3456, 33_452_718_336),
        ("72b", large, 3456, 73_410_777_344),
    ):
        source = card(f"Qwen/Qwen2.5-VL-{size.upper()}-Instruct")
        yield ModelShape(
            f"qwen2.5-vl-{size}", llm, _qwen25_pictures(ffn, llm.hidden), parameters, source, 128_000, qwen25_vl
        )

    sound = TowerShape(  # windows of 2 s are 100 positions of it, 50 embeddings
        32, 1280, 5120, 2, 128 * 3, (1280, 3584), full_layers=0, window_patches=100, other_parameters=3 * 1280**2
    )
    yield ModelShape(
        "qwen2.5-omni-7b",
        small,
        {**_qwen25_pictures(3420, 3584), "audio": Encoding(sound, _SOUND_SECONDS)},
        8_931_813_888,
        Source(SourceKind.PUBLISHED, "config.json of Qwen/Qwen2.5-Omni-7B; the thinker, as Transformers counts it"),
        32_768,
        qwen25_vl,
    )

    clip = TowerShape(23, 1024, 4096, 1, 3 * 14 * 14, (1024, 4096, 4096), other_parameters=577 * 1024)
    yield ModelShape(
        "llava-1.5-7b",
        LlmShape(32, 4096, 32, 32, 11008, 32064),
        {"image": Encoding(clip, 336 * 336 / 576 * PIXEL_SECONDS, 576)},
        7_063_427_072,
        card("llava-hf/llava-1.5-7b-hf, whose last vision layer is not run"),
        4096,
        fixed(576),
    )

    on_card = Source(SourceKind.PUBLISHED, "config.json and card of OpenGVLab/InternVL2_5-8B")
    internlm = LlmShape(32, 4096, 32, 8, 14336, 92553)
    yield ModelShape(
        # vLLM accepts no video for it: its tokenizer has no video token
        "internvl2.5-8b",
        internlm,
        _tiles(_small_vit(4096)),
        8_080_000_000,
        on_card,
        32_768,
        tiles(256, video=False),
    )
    for size, llm, tower, parameters in (
        ("8b", _qwen25_llm(28, 3584, 28, 4, 18944, 151674), _small_vit(3584), 7_944_373_760),
        ("38b", _qwen25_llm(64, 5120, 40, 8, 27648, 151674), _large_vit(5120), 38_388_452_992),
        ("78b", _qwen25_llm(80, 8192, 64, 8, 29568, 151674), _large_vit(8192), 78_408_606_336),
    ):
        source = card(f"OpenGVLab/InternVL3-{size.upper()}")
        yield ModelShape(f"internvl3-{size}", llm, _tiles(tower), parameters, source, 32_768, tiles(256))


MODELS = {shape.name: shape for shape in _models()}


def model(name: str) -> ModelShape:
    """Return the shape of the model with that name.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    return pick("model", name, MODELS)
