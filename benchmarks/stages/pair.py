"""Stock and ours, both up, asked the same things in turns."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.harness.child import Child
from benchmarks.stages import OURS, STOCK, VARIANTS
from benchmarks.stages.load import Request
from dev.omni_cpu.distribution import OUR_PLUGIN, environment
from dev.omni_cpu.spec import TEXT_TO_TEXT, PipelineSpec

Wave = dict[str, Any]
Turn = dict[str, Wave]  # by variant
REPLICATED = 1  # the stage with two replicas


class Pair:
    """Two pipelines that differ in one thing: who schedules their stages.

    Stock runs without our plugin. In both the second of two stages has two replicas, unless ``spec`` is another.

    Args:
        model: of all stages.
        seqs: requests that a replica runs at once.
        options: of the stage scheduler.
        pin: whether the replicas get a core each.
        spec: other fields of `PipelineSpec`.
    """

    def __init__(
        self, model: Path, *, seqs: int, options: Mapping[str, Any] | None = None, pin: bool = False, **spec: Any
    ) -> None:
        self._model, self._options, self._pin = model, dict(options or {}), pin
        usual = {"pipeline": TEXT_TO_TEXT, "mode": "full_payload", "replicas": 2, "replicated": REPLICATED}
        self._spec = PipelineSpec(**usual | spec, max_num_seqs=seqs)
        self._stack = contextlib.ExitStack()
        self._children: dict[str, Child] = {}
        self.version = ""
        self.cores: list[int] = []  # of the replicas, if each has its own

    def __enter__(self) -> Pair:
        try:
            for variant in VARIANTS:
                self._children[variant] = self._start(variant)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, variant: str) -> Child:
        folder = Path(tempfile.mkdtemp(prefix="stages-"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        spec = replace(self._spec, scheduling=self._options if variant == OURS else None)
        around = environment(folder / "site", {})
        if variant == STOCK:
            plugins = around["VLLM_PLUGINS"].split(",")
            around["VLLM_PLUGINS"] = ",".join(name for name in plugins if name != OUR_PLUGIN)
        path = [Path(word) for word in around.pop("PYTHONPATH").split(":")]
        words = ["--model", str(self._model), "--folder", str(folder), "--spec", json.dumps(spec.to_json())]
        if self._pin:
            words += ["--pin", str(REPLICATED)]
        child = Child("benchmarks.stages.serve", words, path=path, environment=around)
        self._stack.enter_context(child)
        up = child.next_event()
        self.version, self.cores = up["vllm_omni"], up["cores"]
        return child

    def ask(self, variant: str, requests: Sequence[Request], *, kill: Any = None, together: bool = True) -> Wave:
        plain = [request.plain() for request in requests]
        return self._children[variant].ask(requests=plain, together=together, kill=kill)

    def start_again(self, variant: str) -> None:
        """Replace a pipeline, of which a stage may have died for good."""
        self._children[variant].stop()
        self._children[variant] = self._start(variant)

    def turn(self, requests: Sequence[Request], rng: Random, *, together: bool = True) -> Turn:
        """Ask both variants, in random order."""
        return {name: self.ask(name, requests, together=together) for name in rng.sample(VARIANTS, len(VARIANTS))}
