"""`fp8-harness handoff`: judges exported weights beside the trainer's, and what is converted beside a second list."""

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from harness.cli.options import json_option, say, write_json
from harness.errors import HarnessError
from harness.headline import headline_of
from harness.hints import EXPLAIN_RULE
from harness.plugins.handoff.agreement import MATCHERS, agreement, read_list
from harness.plugins.handoff.formats import FORMATS
from harness.plugins.handoff.judge import Judged
from harness.plugins.handoff.library import Also, judge
from harness.plugins.handoff.pairing import NothingMatches
from harness.plugins.handoff.reading import read_state
from harness.text import counted
from harness.verdict import ExitCode

PATH = click.Path(path_type=Path)
_SHOWN = 12  # rules or notes
_EPILOG = """\b
Examples:
  fp8-harness handoff trainer.safetensors exported/ --format fp8_block128
  fp8-harness handoff checkpoint/ exported/ --after checkpoint2/ exported2/
  fp8-harness handoff trainer/ exported/ --agrees-with config.json
  fp8-harness handoff exported/ --agrees-with ignored.json --matched-by vllm

\b
SOURCE and EXPORTED: a .safetensors file, a folder of them with or without an
index, or one file for each rank (rank-0.safetensors), or a folder of
torch.distributed.checkpoint. No pickle is loaded, and nothing is written.

\b
Exit codes: 0 nothing found, 1 something is wrong, 2 usage error or bad input,
6 nothing compared: no name of both is the same.
"""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes."""

    exit_code: int
    judged: Judged


@click.command("handoff", epilog=_EPILOG)
@click.argument("source", type=PATH)
@click.argument("exported", type=PATH, required=False)
@click.option("--format", "format_", metavar="NAME", help=f"{', '.join(FORMATS)}. Default: config.json.")
@click.option("--through", type=click.Choice(["bfloat16", "float16"]), help="What the source is cast to first.")
@click.option("--after", type=PATH, nargs=2, help="Source and export of a second hand-off, after an update.")
@click.option("--again", type=PATH, help="What was exported after EXPORTED was loaded.")
@click.option("--not-idempotent", is_flag=True, help="Say that --again may have other bits.")
@click.option("--one-rank", type=PATH, help="The export of one rank, whose bits EXPORTED must have.")
@click.option("--agrees-with", type=PATH, metavar="FILE", help="A second list of what is converted.")
@click.option("--matched-by", metavar="RULE", help=f"How its names are taken: {', '.join(MATCHERS)}.")
@click.option("--rename", "renames", multiple=True, metavar="FROM=TO", help="Rename weights, by regular expressions.")
@json_option("the answer")
def handoff_command(  # noqa: PLR0913  one parameter an option
    *,
    source: Path,
    exported: Path | None,
    format_: str | None,
    through: str | None,
    after: tuple[Path, Path] | None,
    again: Path | None,
    not_idempotent: bool,
    one_rank: Path | None,
    agrees_with: Path | None,
    matched_by: str | None,
    renames: tuple[str, ...],
    json_file: Path | None,
) -> int:
    """Compare exported weights with the trainer's.

    Every weight must be there once, in its format, within half a quantum of its own scale. Without EXPORTED, what
    SOURCE converts is compared with a second list alone.
    """
    also = Also(
        after=after or None,
        again=again,
        idempotent=not not_idempotent,
        one_rank=one_rank,
        agrees_with=agrees_with,
        matched_by=matched_by or "",
    )
    try:
        if exported is None:
            judged = _agreement_alone(source, agrees_with, matched_by or "")
        else:
            pairs = [_rename(text) for text in renames]
            judged = judge(source, exported, format=format_, through=through or "", renames=pairs, also=also)
    except NothingMatches as error:
        say(f"fp8-harness: error: {error.text}", err=True)
        return ExitCode.NOT_COMPARED
    code = ExitCode.FAILED if judged.findings else ExitCode.GOOD
    for line in lines(judged):
        say(line, err=str(json_file) == "-")
    write_json(json_file, Answer(exit_code=code, judged=judged))
    return code


def _rename(text: str) -> tuple[str, str]:
    pattern, equals, to = text.partition("=")
    if not equals or not pattern:
        raise HarnessError("it has no '='.", where=f"--rename {text}", fix="write --rename FROM=TO.")
    return pattern, to


def _agreement_alone(source: Path, agrees_with: Path | None, matched_by: str) -> Judged:
    if agrees_with is None:
        fix = "give EXPORTED, or --agrees-with FILE."
        raise HarnessError("there is nothing to compare it with.", where=str(source), fix=fix)
    agreed = agreement(read_state(source), read_list(agrees_with, matched_by))
    return Judged(format="", notes=tuple(agreed.notes), findings=tuple(agreed.findings))


def lines(judged: Judged) -> Iterator[str]:
    """Yield what is printed."""
    if judged.format:
        quantized = f"{judged.quantized} of them {judged.format}, " if judged.quantized else ""
        yield f"handoff: {counted(judged.weights, 'weight')} compared, {quantized}{counted(judged.values, 'value')}"
    for text in headline_of(judged.findings, command="", ranks=1).texts:
        yield f"handoff: {text}"
    if judged.findings:
        first, *others = judged.findings
        more = dict.fromkeys(
            f"{one.rule} in {one.module}" if one.module else one.rule for one in others if one.rule != first.rule
        )
        if more:
            tail = f", and {len(more) - _SHOWN} more" if len(more) > _SHOWN else ""
            yield f"handoff: also {', '.join(list(more)[:_SHOWN])}{tail}"
        counts = counted(len(judged.findings), "finding")
        yield f"handoff: {counts}; `{EXPLAIN_RULE.replace('RULE', first.rule)}` says what it means"
    else:
        yield "handoff: nothing is wrong"
    if judged.tied:
        yield f"handoff: tied: {', '.join(judged.tied)}"
    if judged.ignored:
        yield f"handoff: no weights: {', '.join(judged.ignored[:_SHOWN])}"
    for note in judged.notes[:_SHOWN]:
        yield f"handoff: {note}"
