"""`python -m tests.differential 17 1000:1500`: stock and ours on these seeds, and the first difference of each that
has one.

`--stock` compares stock with itself, which proves the workloads deterministic; `--set name=value` overrides a setting;
`--tree` is for a PYTHONPATH that begins with the sources of a vLLM that is not installed.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import sys
import traceback
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any


def main() -> int:
    args = _arguments()
    if args.tree:
        from benchmarks.step_cost.tree import enter_tree

        enter_tree()
    import vllm

    logging.getLogger("vllm").setLevel(logging.ERROR)
    overrides = {name: ast.literal_eval(value) for name, _, value in (one.partition("=") for one in args.set)}
    seeds = [seed for text in args.seeds for seed in _range(text)]
    total, failed = _run(seeds, args, overrides)
    if args.json:
        print(json.dumps({"version": vllm.__version__, "tree": str(Path(vllm.__file__).parent), **total}))
    else:
        print(f"{len(seeds) - failed} of {len(seeds)} seeds the same; {dict(total)}")
    return int(failed > 0)


def _run(seeds: list[int], args: argparse.Namespace, overrides: dict[str, Any]) -> tuple[Counter[str], int]:
    from tests.differential.lockstep import Diverged, run_seed

    scheduler_cls = None if args.stock else _ours()
    total: Counter[str] = Counter()
    failed = 0
    shown = monotonic()
    for done, seed in enumerate(seeds, start=1):
        try:
            total.update(run_seed(seed, scheduler_cls, options=args.options, **overrides))
        except Exception as error:  # noqa: BLE001 (whatever it is, it belongs to this seed)
            failed += 1
            plain_difference = isinstance(error, Diverged) and error.__cause__ is None
            print(error if plain_difference else f"seed {seed}:\n{traceback.format_exc()}", flush=True)
            if not args.keep_going:
                break
        if monotonic() - shown > 5 and sys.stderr.isatty():
            shown = monotonic()
            print(f"{done}/{len(seeds)}", file=sys.stderr)
    return total, failed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("seeds", nargs="+", help="a seed, or FIRST:LAST (exclusive)")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--options", type=json.loads, help='JSON for additional_config["omni_sched"]')
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--tree", action="store_true")
    parser.add_argument("--json", action="store_true", help="the last line as JSON")
    return parser.parse_args()


def _range(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def _ours() -> type:
    from vllm_omni_sched import OmniScheduler

    return OmniScheduler


if __name__ == "__main__":
    raise SystemExit(main())
