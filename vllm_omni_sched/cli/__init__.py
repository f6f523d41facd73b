"""The command ``vllm-omni-sched``."""

from typing import Annotated

import typer

from vllm_omni_sched import __version__
from vllm_omni_sched.cli import (
    calibrate,
    decode,
    doctor,
    explain,
    faults,
    import_trace,
    record,
    simulate,
    top,
    tune,
)
from vllm_omni_sched.cli.console import Command

app = typer.Typer(
    name="vllm-omni-sched",
    help="Tools around the multimodal batch scheduler for vLLM and vLLM-Omni.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"vllm-omni-sched {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tools around the multimodal batch scheduler for vLLM and vLLM-Omni."""


app.command("doctor", cls=Command)(doctor.doctor)
app.command("top", cls=Command)(top.top)
app.command("explain", cls=Command)(explain.explain)
app.command("faults", cls=Command)(faults.faults)
app.command("decode", cls=Command)(decode.decode)
app.command("calibrate", cls=Command)(calibrate.calibrate)
app.command("record", cls=Command)(record.record)
app.command("import", cls=Command)(import_trace.import_)
app.command("simulate", cls=Command)(simulate.simulate)
app.command("tune", cls=Command)(tune.tune)
