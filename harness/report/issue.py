"""What `bug export` prints, and the draft of an issue: Markdown, with everything that a maintainer asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.bugs.export import Exported, Proof
from harness.bugs.shrink import Attempt
from harness.matrix.axes import own_axes, shown_value
from harness.matrix.caseid import parse_case_id


def exported_text(exported: Exported, proof: Proof | None) -> str:
    """The files that were written, and what the script told here."""
    made = exported.script
    lines = [
        f"{exported.file}: {len(made.text.splitlines())} lines, {made.ranks} ranks",
        f"{exported.file.with_suffix('.md')}: draft of an issue",
        f"run it by: {_command(exported, whole=True)}",
    ]
    if proof is not None:
        lines += ["run here:", *(f"  {line}" for line in proof.text.splitlines())]
        if proof.outcome != "FAULT":
            lines.append("the script does not show the fault: it needs something that the script leaves out.")
    return "\n".join([*lines, ""])


def issue_text(
    exported: Exported,
    proof: Proof | None,
    *,
    versions: Mapping[str, str],
    device: str,
    neighbours: Sequence[Attempt] = (),
) -> str:
    """The draft: environment, what was run, expected and found, the script, what else fails and what does not."""
    name = exported.file.name
    parts = [
        f"# {exported.title}",
        "## Environment",
        "\n".join([*(f"- {package} {version}" for package, version in versions.items()), f"- {device}"]),
        "## What was run",
        f"{_axes(exported.case_id)}\n\nCase `{exported.case_id}` of fp8-harness.",
        "## What is wrong",
        "\n".join(_divergence(exported)),
        "## Reproduce",
        f"[{name}]({name}) needs torch and torchao only:\n\n```\n{_command(exported)}\n```",
    ]
    if proof is not None:
        parts.append(f"One of the ranks says:\n\n```\n{proof.text}\n```")
    if neighbours:
        parts += ["## What fails, and what does not", "\n".join(_table(exported, neighbours))]
    return "\n\n".join(parts) + "\n"


def _command(exported: Exported, *, whole: bool = False) -> str:
    """The command that runs the script: with whole paths, or from its folder."""
    files = [str(exported.file), *exported.patches]
    shown = files if whole else [Path(each).name for each in files]
    return " ".join(["torchrun --nproc-per-node", str(exported.script.ranks), *shown])


def _axes(text: str) -> str:
    return ", ".join(f"`{name} = {shown_value(value)}`" for name, value in own_axes(parse_case_id(text)).items())


def _divergence(exported: Exported) -> Iterable[str]:
    finding = exported.finding
    yield exported.signature.what if finding is None else finding.first_line
    if finding is None:
        yield "It must be raised: no kernel can run this case."
    elif finding.expected is not None or finding.found is not None:
        yield ""
        yield f"- expected: {finding.expected or 'something else'}"
        yield f"- found: {finding.found or 'nothing'}"
    if exported.signature.kind == "crash" and exported.signature.where:
        yield ""
        yield f"Raised in {', '.join(f'`{each}`' for each in exported.signature.where)}."


def _table(exported: Exported, neighbours: Sequence[Attempt]) -> Iterable[str]:
    yield "| changed | fails by |"
    yield "|---|---|"
    yield f"| nothing | {_cell(exported.signature.text)} |"
    for each in neighbours:
        changed = ", ".join(f"{name} = {shown_value(value)}" for name, value in each.changes.items())
        signature = each.result.signature
        yield f"| {_cell(changed)} | {'nothing: it passes' if signature is None else _cell(signature.text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
