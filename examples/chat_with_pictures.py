"""Ask about pictures while another chat streams, and while a batch job waits its turn.

python -m examples.chat_with_pictures                                                # with a tiny model, on any machine
python -m examples.chat_with_pictures --url http://localhost:8000 cat.jpg dog.png    # with your server
"""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.serving import Serving, client_of, data_url, plain_picture, tiny

SERVING = Serving(
    model="Qwen/Qwen2.5-VL-3B-Instruct",
    options=(
        *("--scheduler-cls", "vllm_omni_sched.OmniScheduler"),
        *("--additional-config", '{"omni_sched": "chat"}'),
    ),
    write_tiny=tiny("llava"),
)


async def stream(client: Any, model: str) -> str:
    """Stream a chat without pictures. Its tokens keep coming while the pictures of others are encoded."""
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a story."}],
        max_tokens=64,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])


async def ask(client: Any, model: str, pictures: Sequence[str], sla_class: str) -> str:
    """Ask about pictures, as a request of a class: the first token of "interactive" is due earlier than of "batch"."""
    answer = await client.chat.completions.create(
        model=model,
        messages=[
            {
                "role": "user",
                "content": [
                    *({"type": "image_url", "image_url": {"url": url}} for url in pictures),
                    {"type": "text", "text": "What do you see?"},
                ],
            }
        ],
        max_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True, "vllm_xargs": {"omni_class": sla_class}},
    )
    return answer.choices[0].message.content or ""


async def chat(url: str, pictures: Sequence[str]) -> dict[str, str]:
    """Send all requests at the same time; return their answers by name."""
    async with client_of(url) as client:
        model = (await client.models.list()).data[0].id
        answers = await asyncio.gather(
            stream(client, model),
            ask(client, model, pictures, "interactive"),
            ask(client, model, pictures[:1], "batch"),
        )
    return dict(zip(("the chat that streams", "the pictures", "the batch job"), answers, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example with these arguments, or with those of the command line."""
    parser = SERVING.parser(__doc__)
    parser.add_argument("pictures", nargs="*", type=Path, help="default: two pictures of one colour each")
    asked = parser.parse_args(arguments)
    pictures = [data_url(mimetypes.guess_type(one)[0] or "image/png", one.read_bytes()) for one in asked.pictures]
    pictures = pictures or [data_url("image/png", plain_picture(color)) for color in ("crimson", "steelblue")]
    with SERVING.running(asked.url) as url:
        for name, answer in asyncio.run(chat(url, pictures)).items():
            print(f"{name}: {answer.strip()}")


if __name__ == "__main__":
    main()
