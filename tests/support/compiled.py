"""Tell whether tests of the compiled steps can run here."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig

from vllm_omni_sched.connectors import native


def why_not_compiled() -> str | None:
    """Return why the compiled steps are missing; None if they are there.

    Without a C compiler nobody can build them. With one, they should have been built: the runner of the tests then
    takes the skip for a failure.
    """
    if native.kernel is not None:
        return None
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    return "no C compiler" if shutil.which(compiler) is None else f"the compiled steps are {native.reason}"
