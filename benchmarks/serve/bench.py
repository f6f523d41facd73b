"""`vllm bench serve`, kept ready: the subprocess that runs it as often as it is told on stdin.

Its imports take as long as a round, and two clients that import beside a measured server would be part of the load.

{"arguments": ["--backend", "openai-chat", …]} → {"kind": "done"} or {"kind": "failed", "error": "…"}
"""

from __future__ import annotations

import json
import sys

from benchmarks.harness.child import emit


def main() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    emit("up")
    while line := sys.stdin.readline():
        try:
            bench_serve(parser.parse_args(json.loads(line)["arguments"]))
        except Exception as error:  # noqa: BLE001 - the benchmark decides what follows
            emit("failed", error=f"{type(error).__name__}: {error}")
        else:
            emit("done")


if __name__ == "__main__":
    main()
