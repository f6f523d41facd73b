"""`python -m dev.tiny_models llava --out .models/llava`: write one of the tiny models."""

from __future__ import annotations

import argparse
from pathlib import Path

from dev.tiny_models import (
    write_eagle,
    write_llama,
    write_llava,
    write_lora,
    write_qwen2_5_vl,
    write_qwen2_audio,
    write_qwen2_vl,
    write_qwen3_vl,
    write_voxtral_realtime,
)
from dev.tiny_models.llava import SIZES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.tiny_models", description="Write a tiny model.")
    models = parser.add_subparsers(dest="model", required=True)

    llava = models.add_parser("llava", help="images: CLIP tower and Llama")
    llava.add_argument("--out", type=Path, default=Path(".models/llava"))
    for name, default in SIZES.items():
        llava.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)

    voxtral = models.add_parser("voxtral-realtime", help="realtime transcription of audio")
    voxtral.add_argument("--out", type=Path, default=Path(".models/voxtral-realtime"))

    llama = models.add_parser("llama", help="text")
    llama.add_argument("--out", type=Path, default=Path(".models/llama"))

    qwen2_vl = models.add_parser("qwen2-vl", help="video and images: a vision tower over patches, and Qwen2")
    qwen2_vl.add_argument("--out", type=Path, default=Path(".models/qwen2-vl"))

    qwen2_5_vl = models.add_parser("qwen2.5-vl", help="the same, with videos that can be pruned")
    qwen2_5_vl.add_argument("--out", type=Path, default=Path(".models/qwen2.5-vl"))

    qwen3_vl = models.add_parser("qwen3-vl", help="video and images, through Qwen3-VL")
    qwen3_vl.add_argument("--out", type=Path, default=Path(".models/qwen3-vl"))

    qwen2_audio = models.add_parser("qwen2-audio", help="clips of sound: an audio tower, and Qwen2")
    qwen2_audio.add_argument("--out", type=Path, default=Path(".models/qwen2-audio"))

    eagle = models.add_parser("eagle", help="a draft for the LLaVA, to speculate with")
    eagle.add_argument("--out", type=Path, default=Path(".models/eagle"))

    lora = models.add_parser("lora", help="an adapter for the LLaVA's language model")
    lora.add_argument("--out", type=Path, default=Path(".models/lora"))

    options = vars(parser.parse_args())
    out = options.pop("out")
    writers = {
        "eagle": write_eagle,
        "llama": write_llama,
        "llava": write_llava,
        "lora": write_lora,
        "qwen2.5-vl": write_qwen2_5_vl,
        "qwen2-audio": write_qwen2_audio,
        "qwen2-vl": write_qwen2_vl,
        "qwen3-vl": write_qwen3_vl,
        "voxtral-realtime": write_voxtral_realtime,
    }
    write = writers[options.pop("model")]
    print(write(out, **options))


if __name__ == "__main__":
    main()
