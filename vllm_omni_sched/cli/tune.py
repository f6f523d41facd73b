"""``vllm-omni-sched tune``: proposes options for a trace or a scenario, with their expected gain."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_omni_sched.cli import tune_view
from vllm_omni_sched.cli.console import USAGE, leave, page_console
from vllm_omni_sched.cli.simulate import runner
from vllm_omni_sched.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_omni_sched.sim.scenario.scenario import Scenario
    from vllm_omni_sched.sim.study.search import Evaluate, Measured, Options, Search, Tried
    from vllm_omni_sched.sim.study.tune import Comparison

_BEST = 3  # candidates that are compared with the baselines
_OWN, _DEFAULTS = "the scenario's policy", "the server's defaults"

_leave = partial(leave, "tune")


@dataclass
class _Job:
    """Holds the input of a tuning run.

    Attributes:
        evaluate: runs a trial; gets all options of a server, to which none is added.
        accepted: returns whether a server would start with these options.
        proposed: returns the options that a trial of Optuna proposes.
        baselines: all options of each baseline, by name; the current ones first.
        max_num_seqs: how many sequences the engine may run now.
        flags: vLLM's own flags, tuned without any option of the scheduler; all trials have them.
        fixed: options that all trials have.
        default: values of the options that a trial does not set.
        what: description of the load.
        costs: sources of the costs.
    """

    evaluate: Evaluate
    accepted: Callable[[Options], bool]
    proposed: Callable[[Any], Options]
    baselines: dict[str, Options]
    fixed: Options
    default: dict[str, Any]
    what: str
    costs: dict[str, str]
    max_num_seqs: int
    flags: Options = field(default_factory=dict)

    def whole(self, options: Options) -> Options:
        """Return all options of a server that tries these options."""
        return self.fixed | next(iter(self.baselines.values())) | self.flags | options

    def trial(self, options: Options, seed: int) -> Measured:
        """Run a trial."""
        return self.evaluate(self.whole(options), seed)

    def starts(self, options: Options) -> bool:
        """Return whether a server would start with the options of a trial."""
        return self.accepted(self.whole(options))


def tune(
    source: Annotated[
        Path,
        typer.Argument(metavar="TRACE|SCENARIO", help="A recorded trace, or a scenario (.toml).", show_default=False),
    ],
    ttft: Annotated[float | None, typer.Option(help="Target TTFT in seconds; default: the scenario's, or 2.")] = None,
    itl: Annotated[
        float | None, typer.Option(help="Target inter-token latency in seconds; default: the scenario's, or 0.1.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Number of option sets to try.")] = 60,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each option set.")] = 3,
    held_out: Annotated[
        int, typer.Option(min=2, max=1000, help="Runs of the best few option sets and of the current options.")
    ] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the options here, as YAML.", show_default=False)
    ] = None,
    result: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the findings here, as JSON.", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help="For a trace: the model.")] = "qwen2.5-vl-7b",
    device: Annotated[str, typer.Option(help="For a trace: the accelerator.")] = "a100-80gb",
    devices: Annotated[int, typer.Option(min=1, max=1024, help="For a trace: tensor parallel.")] = 1,
    scale: Annotated[float, typer.Option(help="For a trace: factor of its rate, such as 1 / replicas.")] = 1.0,
    item_embeds: Annotated[int, typer.Option(min=0, help="For a trace of intervals: embeddings of an item.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Propose options for your load and your SLO: simulated, with the expected gain and its uncertainty.

    vLLM's own flags are tuned first: only what options gain beyond them is theirs.

    Ctrl-C ends the search and keeps the best so far. Exit status: 0 on success, 2 if an argument is invalid.
    """
    from vllm_omni_sched.sim.output import write_text
    from vllm_omni_sched.sim.scenario.loader import load
    from vllm_omni_sched.sim.study.search import Tried, changed_options, pruned
    from vllm_omni_sched.sim.study.tune import trace_scenario

    for name, value in (("--ttft", ttft), ("--itl", itl), ("--scale", scale)):
        if value is not None and not 0 < value < float("inf"):
            _leave(USAGE, f"{name} must be positive, got {value:g}")
    try:
        if source.suffix == ".toml":
            given = {"slo.ttft_seconds": ttft, "slo.itl_seconds": itl}
            scenario = load(source, {key: value for key, value in given.items() if value is not None})
        else:
            machine = model, device, devices
            scenario = trace_scenario(source, ttft or 2.0, itl or 0.1, machine, scale, item_embeds)
        job = _job(scenario)
        _tune_flags(job, range(seeds))
        found = _search(job, trials, range(seeds), seed, quiet)
        if not found.tried:
            _leave(USAGE, "interrupted before anything was tried")
        first, *others = (Tried(changed_options(one.options, job.default), one.runs) for one in found.tried[:_BEST])
        best = pruned(first, job.trial, range(seeds), job.starts)
        compared = _compare(job, [best, *others], seeds, held_out, seed, quiet)
    except ConfigError as error:
        _leave(USAGE, str(error))
    verdict = tune_view.verdict(found, compared)
    options = job.whole(best.options) if compared is None else compared.proposed[1].options
    page_console().print(tune_view.screen(job.what, verdict, options, found, compared))
    try:
        if out is not None:
            write_text(out, tune_view.as_yaml(options, job.what, verdict))
        if result is not None:
            write_text(result, json.dumps(_record(job, verdict, options, found, compared, seed), indent=1) + "\n")
    except OSError as error:
        _leave(USAGE, f"{error.filename or out or result}: {error.strerror or error}")


def _job(scenario: Scenario) -> _Job:
    from vllm_omni_sched.sim.study.search import propose
    from vllm_omni_sched.sim.study.tune import has_lane, on_scenario, own_options, tunable, with_options

    engine, slo = tunable(scenario), scenario.slo
    fixed: Options = {"interactive_ttft_ms": 1e3 * slo.ttft_seconds, "interactive_itl_ms": 1e3 * slo.itl_seconds}
    own = own_options(scenario)
    encodes = has_lane(scenario)

    def accepted(options: Options) -> bool:
        try:
            with_options(scenario, options)
        except ConfigError:
            return False
        return True

    return _Job(
        on_scenario(scenario, runner()),
        accepted,
        lambda trial: propose(trial, slo.itl_seconds, encodes, engine.max_num_seqs),
        ({_OWN: own} if own else {}) | {_DEFAULTS: {}},
        fixed,
        scenario.policy.model_dump(mode="json"),
        f"{scenario.name}, TTFT {slo.ttft_seconds:g} s, between tokens {slo.itl_seconds:g} s",
        {engine.name: engine.model or str(engine.calibration)},
        engine.max_num_seqs,
    )


def _tune_flags(job: _Job, seeds: range) -> None:
    """Add vLLM with its own flags tuned to the baselines, if it does better than with those it has."""
    from vllm_omni_sched.sim.study.search import command_line, tuned_flags

    job.flags = tuned_flags(job.evaluate, seeds, job.max_num_seqs)
    if job.flags:
        job.baselines[f"vLLM with {command_line(job.flags)}"] = job.flags


def _search(job: _Job, trials: int, seeds: range, seed: int, quiet: bool) -> Search:
    from vllm_omni_sched.sim.study.search import best_options

    with tune_view.Bar("Searching", trials, quiet) as bar:

        def report(done: int, best: Tried) -> None:
            bar.at(done, f"best {best.attainment:.1%} within the SLO")

        return best_options(job.proposed, job.trial, seeds, trials, seed, report, job.starts)


def _compare(job: _Job, best: list[Tried], seeds: int, held_out: int, seed: int, quiet: bool) -> Comparison | None:
    """Compare the best option sets with the baselines on held-out seeds; None if it was interrupted."""
    import numpy as np

    from vllm_omni_sched.sim.study.tune import HELD_OUT, compare

    wholes = [job.whole(one.options) for one in best]
    candidates = list(
        {json.dumps(one, sort_keys=True): one for one in wholes if one not in job.baselines.values()}.values()
    )
    done = 0

    def counted(options: Options, one: int) -> Any:
        nonlocal done
        measured = job.evaluate(options, one)
        done += 1
        bar.at(done, "held-out seeds")
        return measured

    with tune_view.Bar("Comparing", (len(job.baselines) + len(candidates)) * held_out, quiet) as bar:
        try:
            held = range(HELD_OUT, HELD_OUT + held_out)
            return compare(candidates, counted, held, range(seeds), np.random.default_rng(seed), job.baselines)
        except KeyboardInterrupt:
            return None


def _record(
    job: _Job, verdict: str, options: Options, found: Search, compared: Comparison | None, seed: int
) -> dict[str, Any]:
    from vllm_omni_sched.sim.output import provenance
    from vllm_omni_sched.sim.study.search import flags_of, policy_of

    return {
        "tune": job.what,
        "simulated": True,
        "provenance": provenance(["vllm-omni-sched", *sys.argv[1:]], seed, job.costs, job.what),
        "said": verdict,
        "flags": flags_of(options),
        "options": policy_of(options),
        "interrupted": found.interrupted or compared is None,
        "trials": found.trials,
        "tried": [{"options": policy_of(job.whole(one.options)), "attainment": one.attainment} for one in found.tried],
        "held_out": tune_view.as_record(compared),
    }
