"""The tokens of real engines for videos, from the frames and from pixel values that a device has made: a program.

`.venv/bin/python -m tests.cuda_double.engine_tokens FOLDER` reads ``FOLDER/FAMILY-NAME.npz`` for every family of
`FAMILIES`, and prints JSON: the tokens of each video by family and name, and how the values that vLLM has replaced
differ from its own.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from dev import tiny_models
from dev.tiny_models import qwen2_5_vl, qwen2_vl, qwen3_vl
from tests.support.pixel_levels import compare

MODELS = Path(__file__).parents[2] / ".models"
TOKENS = 32
PROMPT = "<|vision_start|><|video_pad|><|vision_end|>what?"


class Family(NamedTuple):
    """A family of models: how its tiny one is written, and the files of its processors alone.

    Attributes:
        arguments: with which vLLM calls the video processor.
    """

    processor: str
    arguments: Mapping[str, Any]
    write: Callable[[Path], Path]
    write_processors: Callable[[Path], None]


BYTES = {"do_rescale": False, "do_normalize": False}
"""The engine normalises, before its vision tower: a quarter of the bytes goes there."""
FAMILIES = {
    "qwen2-vl": Family(
        "Qwen2VLVideoProcessor",
        BYTES,
        tiny_models.write_qwen2_vl,
        lambda folder: qwen2_vl.write_processors(folder, "Qwen2VLProcessor", qwen2_vl.SIDE),
    ),
    "qwen2.5-vl": Family(
        "Qwen2VLVideoProcessor",
        BYTES,
        tiny_models.write_qwen2_5_vl,
        lambda folder: qwen2_vl.write_processors(folder, "Qwen2_5_VLProcessor", qwen2_5_vl.SIDE),
    ),
    "qwen3-vl": Family("Qwen3VLVideoProcessor", {}, tiny_models.write_qwen3_vl, qwen3_vl.write_processors),
}


class Replacement:
    """Pixel values that a video processor returns in place of its own.

    Attributes:
        made: values that it has made by itself.
    """

    def __init__(self, values: Any) -> None:
        self._values = values
        self.made: list[Any] = []

    def of(self, preprocess: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            found = preprocess(*args, **kwargs)
            own = found["pixel_values_videos"]
            given = self._values
            if (own.shape, own.dtype) != (given.shape, given.dtype):
                raise ValueError(
                    f"values of a device are {given.dtype} of shape {tuple(given.shape)}, and vLLM makes {own.dtype} "
                    f"of shape {tuple(own.shape)}: give the arguments with which it calls its processor to FAMILIES"
                )
            self.made.append(own)
            found["pixel_values_videos"] = given
            return found

        return replaced


@contextmanager
def values_in_place_of_frames(values: Any) -> Iterator[Replacement]:
    """Let every video processor of this process return these values; the engine does all else by itself."""
    from transformers.video_processing_utils import BaseVideoProcessor

    replacement = Replacement(values)
    with mock.patch.object(BaseVideoProcessor, "preprocess", replacement.of(BaseVideoProcessor.preprocess)):
        yield replacement


class Engine:
    """An engine of vLLM whose parts are objects of this process. It keeps nothing of one request for the next."""

    def __init__(self, model: Path) -> None:
        from vllm import LLM

        self._names = itertools.count()
        self._llm = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=1,
            block_size=32,
            enable_prefix_caching=False,
            mm_processor_cache_gb=0,
            limit_mm_per_prompt={"image": 0, "video": 1},
        )

    def tokens(self, frames: Any, numbers: Sequence[int]) -> list[int]:
        """Return the tokens at temperature 0 for a video."""
        from vllm import SamplingParams

        metadata = {
            "fps": 30.0,
            "duration": 1.0 + numbers[-1] / 30,
            "total_num_frames": numbers[-1] + 1,
            "frames_indices": list(numbers),
            "video_backend": "omni_flashcodec",
            "do_sample_frames": False,
        }
        prompt: Any = {
            "prompt": PROMPT,
            "multi_modal_data": {"video": [(frames, metadata)]},
            "multi_modal_uuids": {"video": [str(next(self._names))]},  # else it would have the encoding of equal frames
        }
        chosen = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        (output,) = self._llm.generate([prompt], chosen, use_tqdm=False)
        return list(output.outputs[0].token_ids)


def of_video(engine: Engine, video: Any) -> dict[str, Any]:
    """Return the tokens of a video: by frames on the host, by values of a device, and by these in another order."""
    import torch

    values = torch.from_numpy(video["values"])
    numbers = video["numbers"].tolist()
    found: dict[str, Any] = {"host": engine.tokens(video["frames"], numbers)}
    for name, given in (("device", values), ("altered", values.flip(0))):
        with values_in_place_of_frames(given) as replacement:
            found[name] = engine.tokens(video["frames"], numbers)
        (own,) = replacement.made
        found[f"{name} levels"] = compare(given, own, video["deviation"].tolist())
    return found


def main(folder: str) -> None:
    from dev.model_registry import look_at_models_here

    look_at_models_here()
    found: dict[str, dict[str, Any]] = {}
    for name, family in FAMILIES.items():
        engine = Engine(family.write(MODELS / name))
        videos = sorted(Path(folder).glob(f"{name}-*.npz"))
        found[name] = {file.stem.removeprefix(f"{name}-"): of_video(engine, np.load(file)) for file in videos}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
