"""Check the patches: `python patches/check.py [--version X] [--fast]`.

For each version that has a folder: fetch the pristine source, lint the headers, apply and reverse the series (without
fuzz, at the lines it names, back to the same bytes), compile what it touches; compare the pristine and the patched tree
by what their schedulers decide on random workloads (vLLM's only) and by the project's own tests of the touched files.
Then report drift: where else each patch applies, and whether what it mends is still there.
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from patches.decisions import run_decisions
from patches.series import Patch, PatchError, Series, git_apply, release_of, title_of
from patches.sources import VERSIONS, SourceError, fetch_source, is_cached, patched_source
from patches.upstream import Comparison, UpstreamError, extras, python_for, run_tests

console = Console(highlight=False, soft_wrap=True)
if not console.is_terminal:
    console = Console(highlight=False, soft_wrap=True, width=120)  # room for the table in a log

NUM_SEEDS = 60


def check_round_trip(series: Series, pristine: Path) -> list[str]:
    """Apply, compile, reverse: the files must be those of the release again, and none more."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = series.copy_touched(pristine, Path(scratch))
        before = {path for path in series.touched() if (folder / path).is_file()}
        try:
            series.apply(folder)
            faults = []
            for path in series.touched():
                try:
                    compile((folder / path).read_text(), path, "exec")
                except SyntaxError as error:
                    faults.append(f"{path}: {error}")
            series.reverse(folder)
        except PatchError as error:
            return [str(error)]
        after = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        faults += [f"{path} is left behind" for path in sorted(after - before)]
        faults += [f"{path} is gone" for path in sorted(before - after)]
        faults += [
            f"{path} is not what it was"
            for path in sorted(before & after)
            if not filecmp.cmp(folder / path, pristine / path, shallow=False)
        ]
    return faults


def compare_tests(series: Series, pristine: Path) -> Comparison:
    python = python_for(series.version)
    tests = series.tests()
    return Comparison(run_tests(pristine, tests, python), run_tests(patched_source(series.version), tests, python))


def compare_decisions(series: Series, pristine: Path) -> tuple[list[str], str]:
    """Run random workloads on both trees: decisions must agree, and workers hold what they are told to use.

    A workload on which stock loses a request is compared up to there; a patched tree must lose none.
    """
    python = python_for(series.version)
    stock = run_decisions(pristine, python, extras(python), NUM_SEEDS)
    ours = run_decisions(patched_source(series.version), python, extras(python), NUM_SEEDS)
    faults = []
    for seed, run in ours.items():
        both = zip(stock[seed]["steps"], run["steps"], strict=not stock[seed]["lost"])
        differ = [number for number, (a, b) in enumerate(both) if a != b]
        if differ:
            faults.append(f"seed {seed} ({run['kind']}): step {differ[0]} is decided differently")
        faults += [
            f"seed {seed} ({run['kind']}): {missing}"
            for missing in run["missing"]
            if missing not in stock[seed]["missing"]
        ]
    faults += [
        f"seed {seed} ({run['kind']}): {run['lost']} wait in no queue" for seed, run in ours.items() if run["lost"]
    ]
    lacking = [sum(bool(run["missing"]) for run in runs.values()) for runs in (stock, ours)]
    return faults, (
        f"same decisions on {NUM_SEEDS} random workloads; runs in which a worker lacks data that it is to encode: "
        f"{lacking[0]} on stock, {lacking[1]} when patched; runs that stock ends with a request in no queue: "
        f"{sum(bool(run['lost']) for run in stock.values())}"
    )


def drift(patch: Patch, series: Series, version: str) -> str:
    """Return how a patch, with those before it where they apply, fares on another version."""
    pristine = fetch_source(version)
    path, text = patch.mends()
    needed = (pristine / path).is_file() and text in (pristine / path).read_text()
    with tempfile.TemporaryDirectory() as scratch:
        folder = series.copy_touched(pristine, Path(scratch))
        state = "conflicts"
        for other in series.patches:
            try:
                git_apply(other, folder, exact=False)
                applied = True
            except PatchError:
                applied = False
            if other is patch:
                state = "applies" if applied else "conflicts"
                break
    return state if needed else "[dim]gone[/]"


def drift_table(all_series: list[Series], fetch: bool) -> Table:
    versions = [version for version in VERSIONS if fetch or is_cached(version)]
    table = Table(
        Column("patch", no_wrap=True),
        *versions,
        title="Drift: does it apply elsewhere, and is what it mends still there",
    )
    for series in all_series:
        others = {v for v in versions if release_of(v)[0] == release_of(series.version)[0]}
        for patch in series.patches:
            cells = [
                "[bold]own[/]" if v == series.version else drift(patch, series, v) if v in others else ""
                for v in versions
            ]
            table.add_row(f"{series.version}/{patch.name.removesuffix('.patch')}", *cells)
    return table


def report(faults: list[str], what: str) -> int:
    console.print(f"  {'[red]✗[/]' if faults else '[green]✓[/]'} {what}")
    for fault in faults:
        console.print(f"      {fault}")
    return len(faults)


def check(series: Series, fast: bool) -> int:
    project, _ = release_of(series.version)
    console.print(f"[bold]{title_of(series.version)}[/], {len(series.patches)} patches")
    faults = report(series.lint(), "headers and series")
    pristine = fetch_source(series.version)
    round_trip = check_round_trip(series, pristine)
    faults += report(round_trip, f"apply, compile, reverse: {len(series.touched())} files")
    if fast or round_trip:
        return faults
    if project == "vllm":
        faults += report(*compare_decisions(series, pristine))
    compared = compare_tests(series, pristine)
    faults += report(
        compared.broken,
        f"tests of the project: {compared.num_passed} pass on the patched tree, {len(compared.added)} of them added; "
        f"{len(compared.failing_on_stock)} fail on stock here",
    )
    for test in compared.failing_on_stock:
        now = "" if compared.patched.get(test) == "failed" else " (passes when patched)"
        console.print(f"      fails on stock: {test}{now}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--version", action="append", choices=Series.versions(), help="only this one (may be repeated)")
    parser.add_argument("--fast", action="store_true", help="leave out what runs vLLM")
    parser.add_argument("--all", action="store_true", help="fetch all known versions for the drift report")
    arguments = parser.parse_args()
    all_series = [Series.read(version) for version in arguments.version or Series.versions()]
    num_patches = sum(len(series.patches) for series in all_series)
    try:
        faults = sum(check(series, arguments.fast) for series in all_series)
        console.print(drift_table(all_series, fetch=arguments.all))
    except (SourceError, UpstreamError) as error:
        console.print(f"[red]patches not checked:[/] {error}")
        return 2
    how = "without running vLLM" if arguments.fast else "with random workloads and the projects' own tests"
    verdict = f"[red]{faults} faults[/]" if faults else "[green]all good[/]"
    console.print(f"{num_patches} patches for {len(all_series)} versions checked {how}: {verdict}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
