"""Put the compiled steps of small messages into the wheel, if there is a C compiler; see `connectors/native`."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "vllm_omni_sched/connectors/native"


class CompiledMessages(BuildHookInterface[Any]):
    """Compiles into the wheel, or for an editable installation into the checkout. Without a compiler, it is pure."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        spec = importlib.util.spec_from_file_location("build", Path(self.root, NATIVE, "build.py"))
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)  # the package itself needs what is not installed yet
        spec.loader.exec_module(native)
        self._scratch = tempfile.TemporaryDirectory(prefix="compiled-messages-")
        try:
            if version == "editable":
                native.build(Path(self.root, NATIVE))
                return
            built = native.build(Path(self._scratch.name))
        except native.BuildError as error:
            self.app.display_warning(f"small messages will take the Python path: {error}")
            return
        build_data["force_include"][str(built)] = f"{NATIVE}/{built.name}"
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._scratch.cleanup()
