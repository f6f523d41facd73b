"""Answer a list of prompts with pictures in one process, without a server.

python -m examples.offline_batch                                                     # with a tiny model, on any machine
python -m examples.offline_batch --model Qwen/Qwen2.5-VL-3B-Instruct cat.jpg dog.png
"""

from __future__ import annotations

import argparse
import mimetypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.serving import ENVIRONMENT, data_url, plain_picture, tiny

OPTIONS = {"scheduler_cls": "vllm_omni_sched.OmniScheduler", "additional_config": {"omni_sched": "exact"}}
TINY_OPTIONS = {"enforce_eager": True, "dtype": "float32", "max_model_len": 1024}


def answers(model: str, pictures: Sequence[str], **options: Any) -> list[str]:
    """Ask a model about each picture; all prompts are given to the engine at once."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, **OPTIONS, **options)
    conversations = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": "Describe the picture."},
                ],
            }
        ]
        for url in pictures
    ]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [output.outputs[0].text for output in llm.chat(conversations, params, use_tqdm=False)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example with these arguments, or with those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: a tiny model with random weights")
    parser.add_argument("pictures", nargs="*", type=Path, help="default: three pictures of one colour each")
    asked = parser.parse_args(arguments)
    pictures = [data_url(mimetypes.guess_type(one)[0] or "image/png", one.read_bytes()) for one in asked.pictures]
    pictures = pictures or [data_url("image/png", plain_picture(color)) for color in ("crimson", "gold", "teal")]
    if asked.model is None:
        os.environ.update(ENVIRONMENT)  # before vLLM is imported, which reads some of it then
        found = answers(str(tiny("llava")()), pictures, **TINY_OPTIONS)
    else:
        found = answers(asked.model, pictures)
    for number, answer in enumerate(found, 1):
        print(f"picture {number}: {answer.strip()}")


if __name__ == "__main__":
    main()
