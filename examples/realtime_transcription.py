"""Transcribe sound while it is being spoken, over the websocket of vLLM's realtime API.

python -m examples.realtime_transcription                                            # with a tiny model, on any machine
python -m examples.realtime_transcription --url http://localhost:8000 speech.wav     # with your server

The server has `--mm-processor-cache-gb 0`. vLLM keeps processed items in a cache, 4 GiB by default, so that an item
that comes again is not processed again. A frame of sound never comes again: for such a server the cache is only
memory that grows with each session, and without it the memory stays flat.
"""

from __future__ import annotations

import asyncio
import base64
import json
import wave
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.serving import Serving, tiny

SERVING = Serving(
    model="mistralai/Voxtral-Mini-4B-Realtime-2602",
    options=(
        *("--scheduler-cls", "vllm_omni_sched.OmniScheduler"),
        *("--additional-config", '{"omni_sched": "realtime"}'),
        *("--mm-processor-cache-gb", "0"),
        *("--tokenizer-mode", "mistral", "--config-format", "mistral"),
    ),
    write_tiny=tiny("voxtral-realtime"),
)
SAMPLE_RATE = 16_000
FRAME_SAMPLES = 1280  # 80 ms


def read(file: Path) -> bytes:
    """Return the samples of a WAV file.

    Raises:
        SystemExit: it is not mono with 16-bit samples at 16 kHz.
    """
    with wave.open(str(file)) as sound:
        if (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) != (1, 2, SAMPLE_RATE):
            raise SystemExit(f"{file} must be mono, with 16-bit samples at {SAMPLE_RATE} Hz: convert it with ffmpeg")
        samples: bytes = sound.readframes(sound.getnframes())
        return samples


def made_up_sound(seconds: float) -> bytes:
    """Return tones that rise."""
    times = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return (8000 * np.sin(2 * np.pi * (200 + 100 * times) * times)).astype("<i2").tobytes()


async def transcribe(url: str, samples: bytes) -> AsyncIterator[str]:
    """Send samples as a microphone does, a frame each 80 ms, and yield the pieces of text as they come."""
    import websockets

    async with websockets.connect(f"{url.replace('http', 'ws', 1)}/v1/realtime", max_size=None) as connection:
        await connection.recv()  # session.created
        await _send(connection, type="session.update", model=await asyncio.to_thread(_model_of, url))
        await _send(connection, type="input_audio_buffer.commit", final=False)
        speaking = asyncio.create_task(_speak(connection, samples))
        async for message in connection:
            event = json.loads(message)
            if event["type"] == "transcription.done":
                break
            if event["type"] == "error":
                raise RuntimeError(f"the server refuses the session: {event}")
            yield event["delta"]
        await speaking


async def _speak(connection: Any, samples: bytes) -> None:
    step = 2 * FRAME_SAMPLES
    for at in range(0, len(samples), step):
        audio = base64.b64encode(samples[at : at + step]).decode()
        await _send(connection, type="input_audio_buffer.append", audio=audio)
        await asyncio.sleep(FRAME_SAMPLES / SAMPLE_RATE)
    await _send(connection, type="input_audio_buffer.commit", final=True)


async def _send(connection: Any, **event: Any) -> None:
    await connection.send(json.dumps(event))


def _model_of(url: str) -> str:
    import httpx

    model: str = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    return model


async def show(url: str, samples: bytes) -> int:
    """Print pieces of text as they come; return how many there were."""
    pieces = 0
    async for piece in transcribe(url, samples):
        print(piece, end="", flush=True)
        pieces += 1
    print()
    return pieces


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example with these arguments, or with those of the command line."""
    parser = SERVING.parser(__doc__)
    parser.add_argument("sound", nargs="?", type=Path, help="a WAV file, 16 kHz, mono, 16 bits; default: tones")
    asked = parser.parse_args(arguments)
    samples = made_up_sound(2.0) if asked.sound is None else read(asked.sound)
    with SERVING.running(asked.url) as url:
        pieces = asyncio.run(show(url, samples))
    print(f"{pieces} pieces of text for {len(samples) / 2 / SAMPLE_RATE:.1f} s of sound")


if __name__ == "__main__":
    main()
