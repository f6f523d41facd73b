"""``python -m vllm_omni_sched`` is the command ``vllm-omni-sched``."""

from vllm_omni_sched.cli import app

if __name__ == "__main__":
    app(prog_name="vllm-omni-sched")
