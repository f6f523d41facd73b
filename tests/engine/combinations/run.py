"""`python -m tests.engine.combinations.run CASES.json RESULTS.json stock|ours`: run the engines, write their answers.

RESULTS.json: `{case: {"rounds": [{"answers": {id: Heard}, "lane": int, "in_step": int, "drafted": int, "left": [id]}],
"files": int, "error": traceback or None}}`: encodings by where they came from, drafts that were verified, requests that
are still there, and files that the engine has left in its folder.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping
from contextlib import closing, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dev.frozen_heap import freeze_for_good
from tests.engine.combinations.cases import FOLDER, Ask
from tests.engine.combinations.speculation_on_cpu import speculate_on_cpu
from tests.engine.harness.async_on_cpu import async_scheduling_on_cpu
from tests.engine.harness.inproc import InProcessEngine
from tests.engine.harness.media import as_float, picture, sound
from tests.engine.harness.spec import OURS, EngineSpec
from tests.engine.harness.workload import Heard

HIDDEN = 128  # of the tiny LLaVA's language model
TOKENS_OF_A_PICTURE = 4
FRAMES = 4  # of a video
MAX_STEPS = 3000


def main(cases_file: str, results_file: str, side: str) -> None:
    speculate_on_cpu()
    import_module("tests.engine.harness.models")
    results = {}
    for number, case in enumerate(json.loads(Path(cases_file).read_text())):
        print(f"=== {case['name']}", flush=True)
        freeze_for_good()
        folder = Path(results_file).with_suffix("") / str(number)
        folder.mkdir(parents=True)
        results[case["name"]] = run_case(case, folder, ours=side == "ours")
        Path(results_file).write_text(json.dumps(results))


def run_case(case: dict[str, Any], folder: Path, *, ours: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"rounds": [], "error": None}
    args = json.loads(json.dumps(case["args"]).replace(FOLDER, str(folder)))
    spec = EngineSpec(
        case["name"],
        case["model"],
        (),
        scheduler=OURS if ours else None,
        omni_sched=case["omni_sched"] if ours else None,
        args=args,
        async_scheduling=case["async_scheduling"],
    )
    try:
        with (
            async_scheduling_on_cpu() if spec.async_scheduling else nullcontext(),
            closing(InProcessEngine(spec)) as it,
        ):
            if "video_pruning_rate" in args:
                prune_on_cpu(it)
            for _ in range(case["rounds"]):
                it.engine.reset_prefix_cache()
                it.engine.reset_encoder_cache()
                result["rounds"].append(run_round(it, [Ask(**ask) for ask in case["asks"]]))
            result["files"] = sum(file.is_file() for file in folder.rglob("*"))
    except Exception:  # noqa: BLE001  whatever it is, the test that reads the results shows it
        result["error"] = traceback.format_exc()
        print(result["error"], flush=True)
    return result


def prune_on_cpu(here: InProcessEngine) -> None:
    """Let the model runner take pruned videos: that of CPUs loads its model without asking whether there may be any."""
    runner = here.core.model_executor.driver_worker.worker.model_runner
    runner.is_multimodal_pruning_enabled = True


def run_round(here: InProcessEngine, asks: list[Ask]) -> dict[str, Any]:
    """Ask, each at its step, until all are answered."""
    before, drafts = taken(here), Drafts(here.core.scheduler)
    heard = {ask.id: Heard() for ask in asks}
    arrivals = sorted(asks, key=lambda ask: ask.at_step)
    waiting: set[str] = set()
    for step in range(MAX_STEPS):
        while arrivals and arrivals[0].at_step <= step:
            waiting.add(arrivals[0].id)
            add(here, arrivals.pop(0))
        if not waiting and not arrivals:
            break
        for output in here.engine.step():
            if hasattr(output.outputs, "data"):  # of a pooling model
                heard[output.request_id] = Heard([], output.outputs.data.flatten().tolist(), "vector")
            else:
                heard[output.request_id].extend(output.outputs[0])
            if output.finished:
                waiting.discard(output.request_id)
    else:
        raise TimeoutError(f"still waiting for {sorted(waiting)} after {MAX_STEPS} steps")
    for _ in range(4):  # what was in flight when the last request left
        here.engine.step()
    after = taken(here)
    return {
        "answers": {id_: vars(answer) for id_, answer in heard.items()},
        **{name: count - before[name] for name, count in after.items()},
        "drafted": drafts.end(),
        "left": sorted(here.core.scheduler.requests),
    }


class Drafts:
    """Counts the draft tokens that a scheduler sends to be verified."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._schedule, self._count = scheduler, scheduler.schedule, 0
        scheduler.schedule = self._counted

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        self._count += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        return output

    def end(self) -> int:
        """Stop counting, and return the count."""
        self._scheduler.schedule = self._schedule
        return self._count


def taken(here: InProcessEngine) -> dict[str, int]:
    """Return how many encodings came from the lane, and from the step, so far."""
    policies = getattr(getattr(here.core.scheduler, "omni", None), "policies", None)
    planner = getattr(policies, "planner", None)
    return {
        "lane": 0 if planner is None else planner.decisions.taken_from_lane,
        "in_step": 0 if planner is None else planner.encoded_in_step,
    }


def add(here: InProcessEngine, ask: Ask) -> None:
    """Send a request as `InProcessEngine` does, with whatever else it asks for."""
    request = here.engine.input_processor.process_inputs(
        ask.id, prompt_of(ask), params_of(ask), here.engine.get_supported_tasks(), lora_request=lora_of(ask.lora)
    )
    request.external_req_id = ask.id
    here.engine.output_processor.add_request(request, ask.prompt)
    here.engine.engine_core.add_request(here._as_sent(request))


def prompt_of(ask: Ask) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if ask.images:
        data["image"] = [picture(number) for number in ask.images]
    if ask.embeds:
        data["image"] = torch.stack([embeddings(number) for number in ask.embeds])
    if ask.audios:
        data["audio"] = [(as_float(np.concatenate(sound(number, 4))), 16_000) for number in ask.audios]
    if ask.videos:
        data["video"] = [video(number) for number in ask.videos]
    return {"prompt": ask.prompt, "multi_modal_data": data} if data else {"prompt": ask.prompt}


def video(number: int) -> tuple[Any, dict[str, Any]]:
    """Return frames, and what a video loader would say about them, which some models ask for."""
    frames = np.stack([np.asarray(picture(9 * number + i)) for i in range(FRAMES)])
    about = {"fps": 2.0, "duration": FRAMES / 2, "total_num_frames": FRAMES, "frames_indices": list(range(FRAMES))}
    return frames, {**about, "video_backend": "opencv", "do_sample_frames": False}


def embeddings(number: int) -> torch.Tensor:
    """Return what a client sends in place of a picture."""
    return torch.randn(TOKENS_OF_A_PICTURE, HIDDEN, generator=torch.Generator().manual_seed(number))


def params_of(ask: Ask) -> Any:
    from vllm import PoolingParams, SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    if not ask.max_tokens:
        return PoolingParams(task="embed")
    how: Mapping[str, Any] = {
        name: StructuredOutputsParams(**value) if name == "structured_outputs" else value
        for name, value in ask.how.items()
    }
    return SamplingParams(
        temperature=0,
        max_tokens=ask.max_tokens,
        ignore_eos="structured_outputs" not in how,
        logprobs=0,
        output_kind=RequestOutputKind.DELTA,
        **how,
    )


def lora_of(folder: str | None) -> Any:
    if folder is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("tiny", 1, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
