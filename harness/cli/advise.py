"""`fp8-harness advise`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.cli.axes import configuration_options
from harness.cli.machine import machine_options
from harness.cli.options import OUTPUT, json_option, write_json, write_output
from harness.matrix.case import Case

if TYPE_CHECKING:
    from harness.performance.machine import Machine

_EPILOG = """\b
Examples:
  fp8-harness advise --model llama3-8b --dp-shard 64 --tp 8 --tokens 8192
  fp8-harness advise --model llama3-70b --dp-shard 32 --tp 8 --tokens 131072 --checkpointing full --device h200
  fp8-harness advise --model debugmodel --vocab-size 2256 --tp 8 --output-layer --recipe tensorwise
  fp8-harness advise tp2-rowwise-v2048-s2-b16 --json - | jq .recommendations
  fp8-harness advise --model llama3-8b --dp-shard 8 --html advice.html

\b
Nothing is run: shapes and bytes are exact, times are a model, and its assumptions are printed.

\b
Exit codes: 0 answered, 2 usage error or bad input, such as a device that is not known.
"""


@click.command("advise", epilog=_EPILOG)
@configuration_options
@machine_options
@click.option("--eager", is_flag=True, help="Print tables for eager blocks, for a case without compiled blocks.")
@json_option("the advice")
@click.option("--html", "html_file", metavar="FILE", type=OUTPUT, help="Write one HTML file with plots.")
def advise_command(*, case: Case, on: Machine, eager: bool, json_file: Path | None, html_file: Path | None) -> None:
    """Predict whether FP8 makes a case or model faster, with which recipe and linears. Runs nothing."""
    from harness.performance.advice import advise
    from harness.project import find_project
    from harness.running.case_judge import known_here

    found = advise(case, on, eager=eager, known=known_here(find_project()))

    def page() -> bytes:
        from harness.report.html.advice import advice_page

        return advice_page(found, case, on)

    write_json(json_file, found)
    write_output(html_file, page)
    if json_file is None and html_file is None:
        from harness.report.advice import advice_text

        click.echo(advice_text(found), nl=False)
