"""What a request asks of a stage, as far as an orchestrator can know that."""

from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.resource.stage_cost import Features
from vllm_omni_sched.sim.servers.pieces import frames_of
from vllm_omni_sched.sim.work import Request

UNKNOWN_TOKENS = 128
"""That a request is expected to make; how many it makes nobody knows."""


def features_of(request: Request, kind: StageKind) -> Features:
    """Of one stage. ``pixels``: of all frames of its clips, for a stage that is no LLM."""
    items = request.items
    autoregressive = kind is StageKind.AR
    pixels = 0
    if not autoregressive:
        clips = [item.clip for item in items if item.clip is not None]
        pixels = sum(frames_of(clip) * clip.width * clip.height for clip in clips)
    return Features(
        prompt_tokens=request.prompt_tokens,
        output_tokens=UNKNOWN_TOKENS if autoregressive else 0,
        items=len(items),
        pixels=pixels,
    )


def keys_of(request: Request) -> frozenset[str]:
    """What other requests may have too: the client, where it is told apart (not 0), and multimodal items."""
    keys = {f"item {item.content}" for item in request.items}
    if request.client:
        keys.add(f"user {request.client}")
    return frozenset(keys)


def work_of(request: Request, kind: StageKind) -> tuple[int, ...] | None:
    """The content of its work, where that of another request may be the same; None: nothing says so.

    What decoders and encoders make depends on the items alone. Of prompts only the lengths are known here.
    """
    if kind is StageKind.AR or not request.items:
        return None
    return tuple(item.content for item in request.items)
