"""`python -m tests.differential 17 1000:1500`: compare stock with ours on these seeds, one line each second or so.

`--stock` compares stock with itself, which proves the workloads deterministic. `--set name=value` overrides a setting.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import sys
import traceback
from collections import Counter
from time import monotonic

from tests.differential.lockstep import Diverged, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("seeds", nargs="+", help="a seed, or FIRST:LAST (exclusive)")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--options", type=json.loads, default=None, help='JSON for additional_config["omni_sched"]')
    parser.add_argument("--keep-going", action="store_true")
    args = parser.parse_args()

    logging.getLogger("vllm").setLevel(logging.ERROR)
    overrides = {name: ast.literal_eval(value) for name, _, value in (one.partition("=") for one in args.set)}
    scheduler_cls = None if args.stock else _ours()
    seeds = [seed for text in args.seeds for seed in _range(text)]
    total: Counter[str] = Counter()
    failed = 0
    shown = monotonic()
    for done, seed in enumerate(seeds, start=1):
        try:
            total.update(run_seed(seed, scheduler_cls, options=args.options, **overrides))
        except Exception as error:  # noqa: BLE001 (whatever it is, the seed belongs to it)
            failed += 1
            print(error if isinstance(error, Diverged) else f"seed {seed}:\n{traceback.format_exc()}", flush=True)
            if not args.keep_going:
                return 1
        if monotonic() - shown > 5 and sys.stderr.isatty():
            shown = monotonic()
            print(f"{done}/{len(seeds)}", file=sys.stderr)
    print(f"{len(seeds) - failed} of {len(seeds)} seeds the same; {dict(total)}")
    return int(failed > 0)


def _range(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def _ours() -> type:
    from vllm_omni_sched import OmniScheduler

    return OmniScheduler


if __name__ == "__main__":
    raise SystemExit(main())
