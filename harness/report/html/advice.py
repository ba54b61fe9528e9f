"""The page of an advice: its tables and recommendations, and curves around the case, in one file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterator

from harness.matrix.case import Case
from harness.performance.advice import Advice
from harness.performance.machine import Machine
from harness.performance.plots import Plot, plots
from harness.report.advice import (
    LINEAR_COLUMNS,
    STEP_COLUMNS,
    VARIANT_COLUMNS,
    VOCABULARY_COLUMNS,
    linear_rows,
    step_rows,
    variant_rows,
    vocabulary_rows,
)
from harness.report.html.page import rendered
from harness.report.sections import Section, Table


def advice_page(found: Advice, case: Case, machine: Machine) -> bytes:
    """The page in UTF-8."""
    drawn = plots(case, machine)
    return rendered(
        "advice.html",
        ("plots.js",),
        data={"told": drawn},
        title=f"fp8-harness: does FP8 pay on {found.device}?",
        lines=(found.case, f"Predicted, not measured. BF16: {found.tokens_s:,.0f} tokens/s and device."),
        sections=(*_sections(found), _values(drawn)),
    )


def _sections(found: Advice) -> Iterator[Section]:
    yield Section(name="advice", title="Recommendations", blocks=tuple(found.recommendations))
    tables = (
        ("speed", "Times as fast as BF16", VARIANT_COLUMNS, variant_rows(found.variants)),
        ("step", f"One step, {found.recipe}", STEP_COLUMNS, step_rows(found)),
        ("linears", f"Linears in one rank and step, {found.recipe}", LINEAR_COLUMNS, linear_rows(found.linears)),
        ("vocabulary", "Vocabulary", VOCABULARY_COLUMNS, vocabulary_rows(found)),
    )
    for name, title, columns, rows in tables:
        yield Section(name=name, title=title, blocks=(Table(columns=columns, rows=tuple(rows)),))
    assumed = tuple((line,) for line in found.assumptions)
    yield Section(
        name="assumptions",
        title="Assumptions",
        blocks=(Table(columns=("assumption",), rows=assumed, title="all", folded=True),),
    )


def _values(drawn: tuple[Plot, ...]) -> Section:
    """What the plots draw, as tables."""
    return Section(
        name="values",
        title="Values of the plots",
        blocks=tuple(
            Table(
                title=plot.title,
                columns=(plot.across, *(line.name for line in plot.lines)),
                rows=tuple(
                    (str(place), *(f"{line.values[at]:.4g}" for line in plot.lines))
                    for at, place in enumerate(plot.places)
                ),
                folded=True,
            )
            for plot in drawn
        ),
    )
