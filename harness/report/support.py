"""The support matrix, `docs/support.md`: which combinations train, in which tier, and the reason of every hole."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from harness.matrix.axes import SCOPE, axis_values, case_from_axes
from harness.matrix.case import Case
from harness.matrix.records import KnownFault, matching
from harness.matrix.rules import exclusions, expected_refusal
from harness.project import Project
from harness.registry import REFERENCE, targets
from harness.report.sections import Section, Table, markdown
from harness.running.selection import recorded_faults, select_file

Axes = Mapping[str, object]

_TIERS = ("smoke", "pr", "nightly")  # the first that has a case is shown
_TARGET = "my_trainer"
_LAYOUTS: Mapping[str, Axes] = {
    "one rank": {},
    "FSDP2": {"dp_shard": 2},
    "HSDP": {"dp_shard": 2, "dp_replicate": 2},
    "DDP": {"dp_replicate": 2},
    "replicate": {"dp_replicate": 2, "replicas": "replicate"},
    "TP": {"tp": 2},
    "async TP": {"tp": 2, "async_tp": True, "compile": "graph"},
    "FSDP2 + TP": {"dp_shard": 2, "tp": 2},
    "EP": {"dp_shard": 2, "ep": 2, "experts": 8},
    "PP": {"pp": 2, "accumulation": 4},
    "CP": {"dp_shard": 2, "cp": 2, "global_batch": 1, "seq_len": 64},  # one sequence, of blocks of MXFP8 on every rank
}
_RECIPES: Mapping[str, Axes] = {
    "bf16": {"recipe": "bf16"},
    "tensorwise": {"recipe": "tensorwise"},
    "… with FP8 all-gather": {"recipe": "tensorwise", "fp8_all_gather": True},
    "rowwise": {"recipe": "rowwise"},
    "mxfp8": {"recipe": "mxfp8"},
}
_EXECUTION: Mapping[str, Axes] = {
    "AC full": {"checkpointing": "full"},
    "AC selective_op": {"checkpointing": "selective_op"},
    "AC selective_layer": {"checkpointing": "selective_layer"},
    "compile graph": {"compile": "graph"},
    "compile inductor": {"compile": "inductor"},
}
_IN_SOME_WAY = {"dtype", "accumulation", "global_batch", "seq_len"}  # a cell is of any of their values
_BASE: Axes = {"recipe": "rowwise", "dtype": "bfloat16"}
_INTRODUCTION = f"""\
A cell names the smallest tier that runs the combination: {", ".join(f"`{tier}`" for tier in _TIERS)}. `untested` runs,
but is in no tier. A number after `no` is the note with the reason; after a tier, a known issue of torch or torchao: the
case must fail as recorded, and pass with the candidate fix. `fp8-harness explain --list support` prints this page."""


class _Cells(msgspec.Struct, frozen=True, kw_only=True):
    """What the cells of a table follow from, and the notes that they have so far."""

    cases: Mapping[str, Sequence[Mapping[str, object]]]  # by tier, the axes of each
    known: Sequence[KnownFault]
    notes: dict[str, int]

    def note(self, name: str, reason: str) -> int:
        return self.notes.setdefault(f"`{name}`: {reason}", len(self.notes) + 1)

    def cell(self, row: Axes, column: Axes) -> str:
        case = case_from_axes({**_BASE, **row, **column})
        if rules := exclusions(case):
            return f"no ({self.note(rules[0].name, f'{rules[0].reason}.')})"
        if (refusal := expected_refusal(case)) is not None:
            return f"refused ({self.note(refusal.name, f'{refusal.reason}.')})"
        faults = matching(self.known, case)
        notes = [self.note(fault.name, _about(fault)) for fault in faults]
        tier = self._tier(case, {**_BASE, **row, **column})
        return f"{tier} ({', '.join(map(str, sorted(notes)))})" if notes else tier

    def _tier(self, case: Case, asked: Axes) -> str:
        if case.target not in targets():
            return "yes"
        wanted = {name: value for name, value in asked.items() if name not in _IN_SOME_WAY}
        wanted["target"] = case.target
        return next(
            (tier for tier, cases in self.cases.items() if any(_has(axes, wanted) for axes in cases)), "untested"
        )


def _about(fault: KnownFault) -> str:
    """Return the versions with a known issue, its link, and the first sentence about it."""
    link = "" if fault.link == "unreported" else f", {fault.link}"
    return f"`{fault.versions}`{link}: {fault.reason.partition('. ')[0].rstrip('.')}."


def _has(axes: Axes, wanted: Axes) -> bool:
    """Return True if a case has these values; a degree above 1 stands for every degree above 1."""
    return all(
        axes[name] > 1 if isinstance(value, int) and not isinstance(value, bool) else axes[name] == value  # type: ignore[operator]
        for name, value in wanted.items()
    )


def support_markdown(project: Project) -> str:
    """Return what `docs/support.md` is."""
    named = (*_TIERS, *(name for name in targets() if name in project.tiers))
    files = {tier: select_file(project, project.case_file(tier)) for tier in named}
    cases = {tier: [axis_values(case) for case in selection.cases] for tier, selection in files.items()}
    cells = _Cells(cases=cases, known=recorded_faults(project), notes={})
    trainers = {name if name != REFERENCE else "built-in Llama": {"target": name} for name in targets()}
    tables = (
        _table("Layouts and recipes", _RECIPES, cells),
        _table("Layouts, checkpointing (AC) and compilation", _EXECUTION, cells),
        _table("Layouts and trainers", {**trainers, "your own": {"target": _TARGET}}, cells),
    )
    # Of some features the reason is how a case asks for them.
    scope = f"{'; '.join(feature.name for feature in SCOPE if ': write ' not in feature.reason)}."
    notes = Section(title="Notes", blocks=("\n".join(_numbered(cells.notes)),))
    outside = Section(title="Out of scope", blocks=(scope,))
    return markdown(
        [Section(title="Support matrix", blocks=(_INTRODUCTION, *tables, notes, outside))], level=1, own=True
    )


def _numbered(notes: Mapping[str, int]) -> Iterator[str]:
    for text, number in notes.items():
        yield f"{number}. {text}"


def _table(title: str, columns: Mapping[str, Axes], cells: _Cells) -> Section:
    rows = tuple((name, *(cells.cell(row, column) for column in columns.values())) for name, row in _LAYOUTS.items())
    return Section(title=title, blocks=(Table(columns=("", *columns), rows=rows),))
