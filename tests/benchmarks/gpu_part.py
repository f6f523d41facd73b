"""A part of `benchmarks.gpu` that behaves as its first argument says: ``--out`` names its folder."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    behaviour, folder = sys.argv[1], Path(sys.argv[sys.argv.index("--out") + 1])
    if behaviour != "fails":
        (folder / "gpu-try-some-gpu.json").write_text(json.dumps({"results": [{"a": 1}]}))
    if behaviour == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.sigwait([signal.SIGTERM])"])
        (folder / "child").write_text(str(child.pid))
        while True:
            time.sleep(60)
    if behaviour == "complains":
        raise SystemExit("1 tensor was wrong")
    if behaviour == "fails":
        raise SystemExit("no memory")


if __name__ == "__main__":
    main()
