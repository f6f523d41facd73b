"""`python -m benchmarks`: the list of what can be measured."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

import benchmarks


def entries() -> list[tuple[str, str]]:
    """(name, first line of its docstring) of every benchmark: a package here that can be run with -m."""
    found = []
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
        if module.ispkg and importlib.util.find_spec(f"{module.name}.__main__"):
            question = (importlib.import_module(module.name).__doc__ or "").strip().splitlines()[0]
            found.append((module.name.removeprefix("benchmarks."), question))
    return found


def main() -> None:
    for name, question in entries():
        print(f"python -m benchmarks.{name:<12} {question}")
    print("\nEach takes --help; results go to benchmarks/results, and benchmarks/README.md says how to read them.")


if __name__ == "__main__":
    main()
