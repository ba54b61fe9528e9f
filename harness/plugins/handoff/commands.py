"""`fp8-harness handoff`: judges exported weights beside the trainer's, and what is converted beside a second list."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from harness.cli.options import json_option, project_of, say, write_json
from harness.errors import HarnessError
from harness.headline import headline_of
from harness.hints import EXPLAIN_RULE
from harness.plugins.handoff.agreement import MATCHERS, agreement, read_list
from harness.plugins.handoff.cases import hand_off_case, is_case
from harness.plugins.handoff.formats import FORMATS, format_named
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
  fp8-harness handoff fsdp2-tp2-rowwise-v2048-s2-b16 --format mxfp8
  fp8-harness handoff fsdp2-ep2-rowwise-moe4-v2048-s2-b16 my_export:to_hf

\b
SOURCE and EXPORTED: a .safetensors file, a folder of them with or without an
index, or one file for each rank (rank-0.safetensors), or a folder of
torch.distributed.checkpoint. No pickle is loaded, and nothing is written.
SOURCE may be a case, which ranks train, and EXPORTED a function that exports
their state, called on each before and after the last step. Without it, torch
exports in --format, or in every one.

\b
Exit codes: 0 nothing found, 1 something is wrong, 2 usage error or bad input,
6 nothing compared: no name of both is the same.
"""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes. `judged`: each format of a hand-off."""

    exit_code: int
    judged: tuple[Judged, ...]


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
    how: dict[str, Any] = {"through": through or "", "renames": [_rename(text) for text in renames]}
    try:
        if is_case(source):
            _check_case(source, also)
            exporter, project = str(exported or ""), project_of((str(source),))
            judged = hand_off_case(project, str(source), exporter, _formats(format_, exporter), {**how, "also": also})
        elif exported is None:
            judged = [_agreement_alone(source, agrees_with, matched_by or "")]
        else:
            judged = [judge(source, exported, format=format_, also=also, **how)]
    except NothingMatches as error:
        say(f"fp8-harness: error: {error.text}", err=True)
        return ExitCode.NOT_COMPARED
    code = ExitCode.FAILED if any(each.findings for each in judged) else ExitCode.GOOD
    for line in (line for each in judged for line in lines(each, short=len(judged) > 1)):
        say(line, err=str(json_file) == "-")
    write_json(json_file, Answer(exit_code=code, judged=tuple(judged)))
    return code


def _formats(name: str | None, exporter: str) -> Sequence[str]:
    """Return the format that is asked for, or all that have scales, where no exporter has its own."""
    if name or exporter:
        return [format_named(name, None, where=exporter).name]
    return [each.name for each in FORMATS.values() if each.dtype]


def _check_case(case: Path, also: Also) -> None:
    given = {"--after": also.after, "--again": also.again, "--one-rank": also.one_rank}
    for option in (option for option, value in given.items() if value):
        what = f"{option} is for files: a case makes its own second and one-rank exports."
        raise HarnessError(what, where=str(case), fix=f"leave {option} out.")


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


def lines(judged: Judged, *, short: bool = False) -> Iterator[str]:
    """Yield what is printed. `short`: one line where nothing is wrong."""
    if short and not judged.findings:
        yield f"handoff: {'; '.join((f'{judged.format}: nothing is wrong', *judged.notes))}"
        return
    if judged.format:
        quantized = f"{judged.quantized} of them {judged.format}, " if judged.quantized else ""
        yield f"handoff: {counted(judged.weights, 'weight')} compared, {quantized}{counted(judged.values, 'value')}"
    for text in headline_of(judged.findings, command="", ranks=1).texts:
        yield f"handoff: {text}"
    if judged.findings:
        first, *others = judged.findings
        more: dict[str, list[str]] = {}
        for one in (one for one in others if one.rule != first.rule):
            more.setdefault(one.rule, []).append(one.module or "")
        if more:
            places = (of[0] if len(of) == 1 else counted(len(of), "module") for of in more.values())
            yield f"handoff: also {', '.join(f'{rule} in {place}' for rule, place in zip(more, places, strict=True))}"
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
