"""Which of the two environments of `make test` this process runs in."""

import sys
from pathlib import Path

FIRST_ENVIRONMENT = Path(sys.prefix).name != ".venv-latest"
"""Whether this is `.venv`, with vLLM-Omni and an older vLLM; an environment of another name counts as that."""
