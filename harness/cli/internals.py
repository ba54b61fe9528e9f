"""`fp8-harness explain --internals`: the private parts of torch and torchao that ranks use."""

from __future__ import annotations

from collections.abc import Mapping

import click

from harness.internals import Part, State, read_parts, with_needed
from harness.jsonform import to_json
from harness.running.machine import internals_here


def print_internals(*, as_json: bool) -> None:
    """Print every part, the names that it uses, why, and what they are in this environment."""
    state = internals_here()
    if as_json:
        click.echo(to_json(_document(state), indent=2))
        return
    parts = read_parts()
    names = sum(len(part.uses) for part in parts.values())
    wrong = sum(len(found) for found in state.gaps.values())
    what = f"{wrong} of {names} private names are not" if wrong else f"all {names} private names are"
    click.echo(f"{what} as declared with {_with(state)}")
    for name, part in parts.items():
        _print_part(name, part, state.gaps[name])


def _with(state: State) -> str:
    versions = " and ".join(f"{library} {version}" for library, version in state.versions.items())
    return f"{versions}; a run checks what it uses in {state.milliseconds:.0f} ms"


def _print_part(name: str, part: Part, gaps: Mapping[str, str]) -> None:
    click.echo(f"\n{name}: {_loss(name)}")
    for use in part.uses:
        how = part.use(use)
        marks = [f"since {how.since}"] if how.since else []
        marks += ["patched"] if how.patched else ["assigned"] if how.set else []
        click.echo(f"  {use}" + (f" ({', '.join(marks)})" if marks else ""))
        click.echo(f"      {how.why}")
        if use in gaps:
            click.echo(f"      NOT AS DECLARED: {gaps[use]}")


def _loss(name: str) -> str:
    """What is lost without a part: of names that several parts share, what these lose."""
    parts = read_parts()
    if parts[name].without:
        return f"without it, {parts[name].without}"
    users = [each for each, part in parts.items() if each != name and part.without and name in with_needed(each)]
    return f"used by {', '.join(users)}"


def _document(state: State) -> dict[str, object]:
    parts = {
        name: {
            "without": part.without,
            "needs": part.needs,
            "files": part.files,
            "uses": {use: _row(part, use, state.gaps[name].get(use, "")) for use in part.uses},
        }
        for name, part in read_parts().items()
    }
    return {"versions": state.versions, "milliseconds": round(state.milliseconds, 1), "parts": parts}


def _row(part: Part, use: str, problem: str) -> dict[str, object]:
    how = part.use(use)
    return {
        "why": how.why,
        "since": how.since,
        "set": how.set,
        "patched": how.patched,
        "takes": how.takes,
        "problem": problem,
    }
