"""Ask about a video, which the server decodes on all its processors.

python -m examples.video_questions                                             # with a tiny model, on any machine
python -m examples.video_questions --url http://localhost:8000 holiday.mp4     # with your server

The server needs PyAV: pip install '.[video]'. The profile `video` chooses the video loader `omni_flashcodec`.
"""

from __future__ import annotations

import asyncio
import io
import mimetypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from examples.serving import Serving, client_of, data_url, tiny

SERVING = Serving(
    model="Qwen/Qwen2.5-VL-3B-Instruct",
    options=(
        *("--scheduler-cls", "vllm_omni_sched.OmniScheduler"),
        *("--additional-config", '{"omni_sched": "video"}'),
    ),
    write_tiny=tiny("qwen2-vl"),
)
QUESTIONS = ("What happens in this video?", "How many people are there?")


def made_up_video(frames: int = 30) -> bytes:
    """Return an MP4 file of one second: a bright square moves over a dark ground."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = 112, 80, "yuv420p"
        for number in range(frames):
            image = np.full((80, 112, 3), 30, np.uint8)
            image[20:50, 2 * number : 2 * number + 30] = 220
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


async def ask(url: str, video: str) -> list[str]:
    """Ask all questions at the same time; the video is decoded for each, and encoded once."""
    async with client_of(url) as client:
        model = (await client.models.list()).data[0].id

        async def answer_to(question: str) -> str:
            content = [{"type": "video_url", "video_url": {"url": video}}, {"type": "text", "text": question}]
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": content}],
                max_tokens=24,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            return answer.choices[0].message.content or ""

        return await asyncio.gather(*map(answer_to, QUESTIONS))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example with these arguments, or with those of the command line."""
    parser = SERVING.parser(__doc__)
    parser.add_argument("video", nargs="?", type=Path, help="default: a moving square")
    asked = parser.parse_args(arguments)
    content = made_up_video() if asked.video is None else asked.video.read_bytes()
    kind = "video/mp4" if asked.video is None else mimetypes.guess_type(asked.video)[0] or "video/mp4"
    with SERVING.running(asked.url) as url:
        for question, answer in zip(QUESTIONS, asyncio.run(ask(url, data_url(kind, content))), strict=True):
            print(f"{question} {answer.strip()}")


if __name__ == "__main__":
    main()
