"""``python -m vllm_omni_sched`` is the command ``vllm-omni-sched``."""

import os

from vllm_omni_sched.sim import compiled


def main() -> None:
    """Run the command; simulations use the compiled modules, if there are any."""
    compiled.use(os.environ.get(compiled.VARIABLE))
    from vllm_omni_sched.cli import app  # imports modules that may be compiled

    app(prog_name="vllm-omni-sched")


if __name__ == "__main__":
    main()
