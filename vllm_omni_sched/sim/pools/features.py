"""Estimate the features of a request in a stage from what an orchestrator can know."""

from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.resource.pipeline.stage_cost import Features
from vllm_omni_sched.sim.servers.pieces import frames_of
from vllm_omni_sched.sim.work import Request

UNKNOWN_TOKENS = 128
"""Expected output tokens of a request, whose actual number is unknown in advance."""


PIXELS_PER_EMBED = 28 * 28
"""Pixels of a picture that become one embedding, as in Qwen2-VL."""


def features_of(request: Request, kind: StageKind) -> Features:
    """Return the features of a request in one stage. ``pixels``: of all frames of its clips, except for LLM stages."""
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
    """Return keys of data that other requests may share: the client, if known (not 0), and multimodal items."""
    keys = {f"item {item.content}" for item in request.items}
    if request.client:
        keys.add(f"user {request.client}")
    return frozenset(keys)


def bytes_of(request: Request) -> int:
    """Return the bytes of a request's input, as an orchestrator gets it: its text, and its items as RGB pixels."""
    held = 8 * request.text_tokens
    for item in request.items:
        clip = item.clip
        held += 3 * (PIXELS_PER_EMBED * item.embeds if clip is None else clip.wanted * clip.width * clip.height)
    return held


def work_of(request: Request, kind: StageKind) -> tuple[int, ...] | None:
    """Return the content of its work if another request may have the same; None if that is not known.

    The output of decoders and encoders depends on the items alone. Of prompts only the lengths are known here.
    """
    if kind is StageKind.AR or not request.items:
        return None
    return tuple(item.content for item in request.items)
