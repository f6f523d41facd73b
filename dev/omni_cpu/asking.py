"""Ask a pipeline that runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from dev.omni_cpu.spec import BRANCHES, PipelineSpec

WORDS = 12  # that the text stage says of what is to be drawn


class Ask(NamedTuple):
    """A request for which the thinker makes `thinks` tokens and the talker `says`; the talker never ends first.

    ``delta``: its client gets each token of a text once, and otherwise all that was said so far each time.
    """

    prompt: str
    thinks: int
    says: int
    delta: bool = False


class Draw(NamedTuple):
    """One request for a square picture; without a seed it is another one each time."""

    prompt: str
    seed: int | None
    steps: int = 60
    side: int = 64  # pixels


async def answer_to(omni: Any, spec: PipelineSpec, request_id: str, ask: Ask) -> dict[str, Any]:
    """Return `{"text": {stage: token ids}, "sound": samples}`, with sound if the pipeline makes any.

    Raises:
        RuntimeError: the request failed.
    """
    answer: dict[str, Any] = {"text": {}}
    params = sampling_params(spec, ask)
    async for output in omni.generate(ask.prompt, request_id=request_id, sampling_params_list=params):
        if output.error:
            raise RuntimeError(f"{request_id}: {output.error}")
        take(output, answer, ask.delta)
    return answer


def take(output: Any, answer: dict[str, Any], delta: bool = False) -> None:
    """Add what one output of vLLM-Omni says. ``delta``: its text is what is new."""
    if output.final_output_type == "audio":
        answer["sound"] = output.multimodal_output["audio"].flatten().tolist()
    else:
        stage = str(output.stage_id)
        before = answer["text"].get(stage, []) if delta else []
        answer["text"][stage] = [*before, *output.outputs[0].token_ids]


def sampling_params(spec: PipelineSpec, ask: Ask) -> list[Any]:
    """Return sampling parameters for each stage, at temperature 0."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    max_tokens = [ask.thinks, ask.says, *([echoes(ask)] if spec.pipeline == BRANCHES else []), 1, 1]
    stream = RequestOutputKind.DELTA if ask.delta else RequestOutputKind.CUMULATIVE
    streams = (0, 2) if spec.pipeline == BRANCHES else (0,)
    return [
        SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens[stage],
            ignore_eos=True,
            output_kind=stream if stage in streams else RequestOutputKind.FINAL_ONLY,
        )
        for stage in range(spec.stages)
    ]


def echoes(ask: Ask) -> int:
    """Return how many codes the second talker of the pipeline that branches says."""
    return ask.says // 2 + 1


def speaking_and_drawing_params(spec: PipelineSpec, draw: Draw, says: int) -> list[Any]:
    """Return the parameters of the stages that make text and sound of a prompt, and of the one that draws its text."""
    return [*sampling_params(spec, Ask(draw.prompt, WORDS, says))[:3], drawing_params(draw)[1]]


def drawing_params(draw: Draw) -> list[Any]:
    """Return the parameters of the text stage and of the diffusion stage."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    kind = RequestOutputKind.FINAL_ONLY
    return [
        SamplingParams(temperature=0.0, max_tokens=WORDS, ignore_eos=True, output_kind=kind),
        OmniDiffusionSamplingParams(seed=draw.seed, num_inference_steps=draw.steps, height=draw.side, width=draw.side),
    ]
