"""Get spoken answers from a pipeline of stages, thinker, talker and vocoder, on vLLM-Omni.

python -m examples.speech_with_stages                                            # with tiny models, on any machine
python -m examples.speech_with_stages --url http://localhost:8000 --out folder   # with your server

The deploy YAML of vLLM-Omni has the key `omni_sched`, which enables the stage scheduler of this package. For a real
model, copy the deploy YAML that vLLM-Omni ships for it, and add the key; it may name the file with the options:

folder=$(python -c "from importlib.util import find_spec; print(find_spec('vllm_omni').submodule_search_locations[0])")
cp "$folder/deploy/qwen3_omni_moe.yaml" deploy.yaml
cp examples/omni_sched.yaml . && echo 'omni_sched: omni_sched.yaml' >> deploy.yaml
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.serving import Serving, client_of, tiny

OPTIONS = Path(__file__).with_name("omni_sched.yaml")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
QUESTIONS = ("Why is the sky blue?", "Why is the sky blue?", "What is a vocoder?")
TINY_PARAMS = [  # the usual sampling parameters of thinker, talker and vocoder; a tiny talker does not end by itself
    {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True},
    {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True},
    {"temperature": 0.0, "max_tokens": 1},
]


def deploy_tiny(folder: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    """Write the deploy YAML of the tiny pipeline, with the same options of the stage scheduler.

    Returns the options of the command and the variables of its processes.
    """
    import yaml

    from dev.omni_cpu.deploy import write_deploy
    from dev.omni_cpu.distribution import environment
    from dev.omni_cpu.spec import TEXT_TO_SOUND, PipelineSpec

    spec = PipelineSpec(TEXT_TO_SOUND, "full_payload", scheduling=yaml.safe_load(OPTIONS.read_text()))
    file = write_deploy(spec, folder / "deploy.yaml")
    deploy = yaml.safe_load(file.read_text())
    for stage, params in zip(deploy["stages"], TINY_PARAMS, strict=True):
        stage["default_sampling_params"] = params
    file.write_text(yaml.safe_dump(deploy))
    return ("--deploy-config", str(file)), {**environment(folder / "site", {}), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


SERVING = Serving(
    model="Qwen/Qwen3-Omni-30B-A3B-Instruct",
    options=("--omni",),
    real_options=("--deploy-config", "deploy.yaml"),
    write_tiny=tiny("llama"),
    program=(sys.executable, "-m", "dev.omni_cpu.serve"),
    tiny_options=("--chat-template", TEMPLATE),
    prepare=deploy_tiny,
)


async def ask(url: str) -> list[bytes]:
    """Ask all questions at the same time, and return the sound of each answer.

    Questions that are equal and in flight together share their work, if the server samples with a seed or greedily.
    """
    async with client_of(url) as client:
        model = (await client.models.list()).data[0].id

        async def answer_to(question: str) -> bytes:
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                modalities=["audio"],
                extra_body={"vllm_xargs": {"omni_class": "interactive"}},
            )
            (sound,) = [choice.message.audio for choice in answer.choices if choice.message.audio is not None]
            return base64.b64decode(sound.data)

        return await asyncio.gather(*map(answer_to, QUESTIONS))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example with these arguments, or with those of the command line."""
    parser = SERVING.parser(__doc__)
    parser.add_argument("--out", type=Path, help="folder for the answers as WAV files")
    asked = parser.parse_args(arguments)
    with SERVING.running(asked.url) as url:
        sounds = asyncio.run(ask(url))
    for number, (question, sound) in enumerate(zip(QUESTIONS, sounds, strict=True), 1):
        print(f"{question} {len(sound)} bytes of sound")
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / f"answer-{number}.wav").write_bytes(sound)


if __name__ == "__main__":
    main()
