"""A page of metrics as vLLM 0.30 has it, for tests without a server."""

from collections.abc import Mapping, Sequence

_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_LABELS = 'engine="0",model_name="m"'
_HISTOGRAMS = {
    "vllm:request_prompt_tokens": "Number of prefill tokens processed.",
    "vllm:request_generation_tokens": "Number of generation tokens processed.",
    "vllm:request_params_max_tokens": "Histogram of the max_tokens request parameter.",
}


def page(
    finished: Mapping[str, int] | None = None,
    prompts: Sequence[int] = (),
    outputs: Sequence[int] = (),
    running: int = 0,
    waiting: int = 0,
    items: int = 0,
    classes: Mapping[str, int] | None = None,
    started: float = 100.0,
) -> str:
    """Counters of a server that has finished so many requests, by reason; prompts and outputs are their tokens."""
    lines = ["# HELP process_start_time_seconds Start time of the process since unix epoch in seconds."]
    lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {started}"]
    for name, value in (("running", running), ("waiting", waiting)):
        lines += [f"# HELP vllm:num_requests_{name} Number of requests.", f"# TYPE vllm:num_requests_{name} gauge"]
        lines += [f"vllm:num_requests_{name}{{{_LABELS}}} {float(value)}"]
    lines += ["# HELP vllm:mm_cache_queries_total Items.", "# TYPE vllm:mm_cache_queries_total counter"]
    lines += [f"vllm:mm_cache_queries_total{{{_LABELS}}} {float(items)}"]
    lines += ["# HELP vllm:request_success_total Count of successfully processed requests."]
    lines += ["# TYPE vllm:request_success_total counter"]
    for reason in ("stop", "length", "abort", "error", "repetition"):
        number = float((finished or {}).get(reason, 0))
        lines += [f'vllm:request_success_total{{{_LABELS},finished_reason="{reason}"}} {number}']
    for (name, text), values in zip(_HISTOGRAMS.items(), (prompts, outputs, ()), strict=True):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
        for bound in (*map(float, _BOUNDS), float("inf")):
            number = float(sum(value <= bound for value in values))
            lines += [f'{name}_bucket{{{_LABELS},le="{bound if bound < float("inf") else "+Inf"}"}} {number}']
        lines += [f"{name}_count{{{_LABELS}}} {float(len(values))}", f"{name}_sum{{{_LABELS}}} {float(sum(values))}"]
    if classes:
        name = "vllm:omni_sched_slo_met_total"
        lines += [f"# HELP {name} Requests that met their targets.", f"# TYPE {name} counter"]
        lines += [f'{name}{{{_LABELS},class="{one}"}} {float(number)}' for one, number in classes.items()]
    return "\n".join(lines) + "\n"
