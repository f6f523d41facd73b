"""Run ``vllm-omni-sched``, also as ``python -m vllm_omni_sched``."""


def main() -> None:
    """Run the command."""
    from vllm_omni_sched.cli import app

    app(prog_name="vllm-omni-sched")


if __name__ == "__main__":
    main()
