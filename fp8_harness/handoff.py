"""`assert_handoff`: what a trainer exported, beside what it trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias

Tensors: TypeAlias = "Mapping[str, Any]"
Given: TypeAlias = "str | PathLike[str] | Tensors | Sequence[Tensors]"


def assert_handoff(  # noqa: PLR0913  each is one thing that may be handed over
    source: Given | Callable[[], Tensors],
    exported: Given | Callable[[Tensors], Tensors],
    *,
    format: str | None = None,
    ranks: int = 0,
    update: Callable[[Tensors], object] | None = None,
    load: Callable[[Tensors], Tensors] | None = None,
    through: str = "",
    renames: Sequence[tuple[str, str]] = (),
    **also: Any,
) -> None:
    """Compare exported weights with their source: names, dtypes, scales, values, order, shards.

    `source`, `exported`: a path of safetensors or of torch.distributed.checkpoint, tensors by name, or a list of those
    of each rank. Or functions, called on so many `ranks` of the CPU: the first returns a state, with DTensors or not,
    and the second is given that state. `update` changes the state in place before it is exported again, `load` makes a
    state of what was exported. `format`: of `fp8-harness handoff --help`; None where a config.json says it. `also`:
    fields of a second hand-off, such as `agrees_with="config.json"` or `idempotent=False`.

    Raises AssertionError with the three lines of a finding, and HarnessError for bad input.
    """
    __tracebackhide__ = True
    from harness.errors import HarnessError
    from harness.headline import headline_of
    from harness.registry import answer

    try:
        if callable(source):
            assert callable(exported), "where the source is a function, what exports it is one too"
            source, exported, more = _on_ranks((source, exported, update, load), ranks)
            also = {**more, **also}
        judge = answer("check a hand-off", where="assert_handoff")
        judged = judge(source, exported, format=format, through=through, renames=renames, also=also)
    except HarnessError as error:
        raise error.with_traceback(None) from None  # bad input is no fault of the harness: its frames say nothing
    if judged.findings:
        lines = headline_of(judged.findings, command="", ranks=1).texts
        rest = dict.fromkeys(finding.rule for finding in judged.findings if finding.rule != judged.findings[0].rule)
        raise AssertionError("\n".join((*lines, *((f"also {', '.join(rest)}",) if rest else ()))))


def _on_ranks(functions: Sequence[Callable[..., Any] | None], ranks: int) -> tuple[Any, Any, dict[str, Any]]:
    """Return what functions made on ranks, by rank: the source, its export, and what belongs to a second one."""
    from fp8_harness.builds import write_module
    from fp8_harness.ranks import run_on_ranks
    from harness.registry import answer

    names = [write_module(function) if function else "" for function in functions]
    made = run_on_ranks(answer("hand off on a rank", where="assert_handoff"), max(ranks, 1), *names)
    of = {key: [one[key] for one in made] for key in made[0]}
    more: dict[str, Any] = {key: of[key] for key in ("again", "kept") if key in of}
    if "after" in of:
        more["after"] = of["updated"], of["after"]
    return of["source"], of["exported"], more
