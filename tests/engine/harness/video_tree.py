"""Our video loader beside the rules of a vLLM that may not be the installed one.

`tests/differential/test_other_versions.py` runs it on trees of sources. It prints as JSON where vLLM came from, and for
every rule and video of a few whether ours gives what stock gives.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

CLIPS = ("h264_open_gop", "h264_vfr", "h264_trimmed", "vp9")
TARGETS: tuple[dict[str, Any], ...] = ({}, {"num_frames": 8}, {"num_frames": -1, "fps": 2})


def main() -> None:
    import vllm
    from vllm.multimodal.video import VIDEO_LOADER_REGISTRY as registry

    from tests.support.clips import clip
    from vllm_omni_sched.engine.video.loader import FlashCodecLoader
    from vllm_omni_sched.video.options import VideoOptions
    from vllm_omni_sched.video.service import FlashCodec

    needs_gpu = getattr(registry, "backend_requires_gpu", lambda _: False)
    same = {}
    with FlashCodec(VideoOptions(decoders=2)) as service:
        for rule in [name for name in registry.name2class if not needs_gpu(name)]:
            for name in CLIPS:
                for target in TARGETS:
                    stock = _outcome(registry.load(rule), clip(name), target)
                    ours = _outcome(FlashCodecLoader(service), clip(name), {"sampling": rule, **target})
                    same[f"{rule} {name} {target}"] = ours[1] == stock[1] and np.array_equal(ours[0], stock[0])
    print(json.dumps({"vllm": vllm.__file__, "same": same}))


def _outcome(loader: Any, data: bytes, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    try:
        frames, metadata = loader.load_bytes(data, **kwargs)
    except ValueError as error:
        return 0, str(error)
    return np.asarray(frames), metadata


if __name__ == "__main__":
    main()
