"""One console for all benchmarks: wide enough for a table where the output is no terminal (a log, a pipe)."""

import sys

from rich.console import Console

console = Console(width=None if sys.stdout.isatty() else 120)
