"""Judges a hand-off: each exported weight beside the source, by the rules of `rules.py`."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from harness.checks.catalogue import by_cause
from harness.checks.check import Rule
from harness.plugins.handoff import pairing, rules
from harness.plugins.handoff.blocks import CLAMPED, Blocks, Kind, compare, explain
from harness.plugins.handoff.formats import Format
from harness.plugins.handoff.numbers import FLOATS, OF_TORCH, QUANTIZED, TORCH_NAMES, Array, is_power_of_two, rounded
from harness.plugins.handoff.order import Other, holds, is_like
from harness.plugins.handoff.tensors import Matrix, Scaled, State, bits_of, pieces
from harness.verdict import Finding, Value

_SEARCHES = 64  # wrong weights that are looked for among others


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a hand-off is judged by. `through`: a dtype of torch that the source is cast to before it is quantized."""

    format: Format
    source_format: Format | None = None
    through: str = ""
    renames: tuple[tuple[str, str], ...] = ()


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, and what was found."""

    format: str
    weights: int = 0
    quantized: int = 0
    values: int = 0
    tied: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def wrong_at(rule: Rule, unit: pairing.Unit, expected: str, found: str, **values: Value) -> Finding:
    """Return a finding about a weight."""
    return rule.finding(module=unit.given, expected=expected, found=found, values=values)


def judge_states(source: State, exported: State, asked: Asked) -> Judged:
    """Compare what was exported with the source. HarnessError where no name of both is the same."""
    ours, theirs = pairing.units_of(source, asked.renames), pairing.units_of(exported, asked.renames)
    pairs = pairing.paired(ours, theirs)
    pairing.check_names(pairs, source, exported)
    found = [*shards(source), *shards(exported)]
    tied, left = _tied(pairs, ours, source, exported)
    found += left
    found += [rules.STRAY.finding(module=held.name) for held in theirs.stray]
    one = _Pairs(asked, ours)
    for pair in pairs.pairs:
        found += one.judge(pair)
    is_quantized = [pair.exported.view.held.dtype in QUANTIZED for pair in pairs.pairs]
    if asked.format.dtype and not any(is_quantized):
        found.append(rules.NOT_QUANTIZED.finding(expected=f"{asked.format.dtype} weights", found="none"))
    return Judged(
        format=asked.format.name,
        weights=len(pairs.pairs),
        quantized=sum(is_quantized),
        values=sum(pair.exported.view.shape[0] * pair.exported.view.shape[1] for pair in pairs.pairs),
        tied=tuple(tied),
        ignored=(*ours.ignored, *theirs.ignored),
        findings=by_cause(found),
    )


def _tied(pairs: pairing.Pairs, ours: pairing.Units, source: State, exported: State) -> tuple[list[str], list[Finding]]:
    """Return which weights are on one side only because they are tied, and the findings about others."""
    tied, found = [], list[Finding]()
    left, lost = [(rules.MISSING, unit, exported) for unit in pairs.missing], {unit.name for unit in pairs.missing}
    for rule, unit, other in [*left, *((rules.EXTRA, unit, source) for unit in pairs.extra)]:
        twin = next((each for each in ours.by_name.values() if each is not unit and _are_tied(each, unit)), None)
        if twin is None or twin.name in lost:
            found.append(wrong_at(rule, unit, f"{_words(unit.view.shape)} in {other.origin}", "nothing"))
        else:
            tied.append(f"{unit.given} = {twin.given}")
    return tied, found


def _are_tied(first: pairing.Unit, second: pairing.Unit) -> bool:
    """Return True for the ends of a model with equal values; no other weights are tied."""
    ends = ("embed_tokens.weight", "lm_head.weight", "wte.weight")
    return first.name.endswith(ends) and second.name.endswith(ends) and pairing.same_values(first.view, second.view)


def shards(state: State) -> Iterator[Finding]:
    """Yield what is wrong with the parts of tensors: those that overlap and differ, and what none of them has."""
    for held in state.tensors.values():
        kept: dict[tuple[tuple[int, ...], tuple[int, ...]], Any] = {}
        for part in held.parts:
            first = kept.setdefault((part.offsets, part.raw.shape), part)
            if first is not part and not np.array_equal(bits_of(first.raw), bits_of(part.raw)):
                places = tuple(rank for rank in (first.rank, part.rank) if rank is not None)
                yield rules.REPLICAS.finding(module=held.name, ranks=places, expected="equal bits", found="others")
                break
        size, covered = int(np.prod(held.shape)), sum(part.raw.size for part in kept.values())
        if covered < size:
            expected = f"{size} values"
            yield rules.GAP.finding(module=held.name, count=size - covered, expected=expected, found=f"{covered}")


class _Pairs:
    """Judges pairs one by one; `units` are those of the source, among which the right one is looked for."""

    def __init__(self, asked: Asked, units: pairing.Units) -> None:
        self._asked, self._searches = asked, _SEARCHES
        self._by_shape: dict[tuple[int, int], list[pairing.Unit]] = {}
        for unit in units.by_name.values():
            self._by_shape.setdefault(unit.view.shape, []).append(unit)
        self._through = OF_TORCH.get(asked.through, "")

    def judge(self, pair: pairing.Pair) -> Iterator[Finding]:
        unit, source = pair.exported, pairing.matrix_of(pair.source, self._asked.source_format)
        view, shape = unit.view, unit.view.shape
        if shape != source.shape:
            larger = all(mine >= there for mine, there in zip(shape, source.shape, strict=True))
            if not larger or not self._asked.format.dtype or view.held.dtype not in QUANTIZED:
                yield _shape(unit, source)
                return
            yield from self._padding(unit, source)
            if shape[1] != source.shape[1]:
                return
            unit = unit._replace(view=view.cut(0, source.shape[0]))
        if view.held.dtype in QUANTIZED:
            yield from self._quantized(pair, unit, source)
        else:
            yield from self._plain(pair, unit, source)

    def _padding(self, unit: pairing.Unit, source: Matrix) -> Iterator[Finding]:
        """Yield the finding about what is behind the end of the source, and is not zero."""
        count, (rows, columns) = 0, source.shape
        for start, stop in pieces(unit.view.shape):
            values = unit.view.values(start, stop)
            values[: max(0, rows - start), :columns] = 0
            count += int(np.count_nonzero(values))  # NaN counts
        if count:
            yield wrong_at(rules.PADDING, unit, "0", f"{count} others", count=count)

    def _quantized(self, pair: pairing.Pair, unit: pairing.Unit, source: Matrix) -> Iterator[Finding]:
        form, held = self._asked.format, unit.view.held
        dtype = TORCH_NAMES[held.dtype]
        if held.dtype != form.dtype:
            expected = TORCH_NAMES.get(form.dtype, "no float8")
            yield wrong_at(rules.DTYPE, unit, expected, dtype, what="the data", dtype=dtype, format=form.name)
            if not form.dtype:
                return
        if unit.scale is None:
            yield wrong_at(rules.NO_SCALE, unit, f"{held.name}{form.suffixes[0]}", "no scale", dtype=dtype)
            return
        stored = unit.scale.held.dtype
        if stored not in form.scales:
            expected, found = " or ".join(TORCH_NAMES[each] for each in form.scales), TORCH_NAMES[stored]
            yield wrong_at(rules.DTYPE, unit, expected, found, what="the scale", dtype=found, format=form.name)
            if stored not in ("F64", "F32", "BF16", "F16"):
                return
        try:
            scales = pairing.scale_grid(unit, form)
        except ValueError as error:
            yield _scale_shape(unit, form, str(error))
            return
        yield from self._scaled(pair, unit, source, scales)

    def _scaled(self, pair: pairing.Pair, unit: pairing.Unit, source: Matrix, scales: Array) -> Iterator[Finding]:
        """Yield what is wrong with the scales and the values of a weight."""
        kind = Kind(self._asked.format, unit.view.held.dtype, self._through)
        blocks = compare(source, unit.view, scales, kind)
        lost = ~np.isfinite(blocks.amax)
        if lost.any():
            found = f"{blocks.amax[_first(lost)]} in block {_first(lost)}"
            count = sum(int((~np.isfinite(source.values(*rows))).sum()) for rows in pieces(source.shape))
            yield wrong_at(rules.NUMBER, unit, "numbers", found, count=count, where=" of the source")
            return
        wrong = (scales < 0) | ~np.isfinite(scales) | ((scales == 0) & (blocks.largest > 0))
        if wrong.any():
            yield _of_scales(rules.SCALE_RANGE, unit, scales, wrong, "more than 0")
            return
        if blocks.nonfinite.any():
            place, count = _first(blocks.nonfinite), int(blocks.nonfinite.sum())
            zero = "" if blocks.amax[place] else ", an all-zero block"
            found = f"block {place} with scale {scales[place]:.4g}"
            yield wrong_at(rules.NUMBER, unit, "numbers", found, count=count, where=zero)
            return
        uneven = ~is_power_of_two(scales) & (scales != 0)
        if kind.format.power_of_two and uneven.any():
            yield _of_scales(rules.POWER, unit, scales, uneven, "a power of two")
        is_shared = bool(unit.view.at) and unit.scale is not None and not unit.scale.at  # by experts of any size
        if blocks.off:
            yield self._off(pair, unit, source, scales, blocks)
        elif not is_shared:
            yield from _too_large(unit, blocks, kind)

    def _off(self, pair: pairing.Pair, unit: pairing.Unit, source: Matrix, scales: Array, blocks: Blocks) -> Finding:
        """Return the finding about values that are off: by their scales, their order, or nothing that is known."""
        kind = Kind(self._asked.format, unit.view.held.dtype, self._through)
        why = explain(source, unit.view, scales, kind, blocks)
        if why is not None:
            (how, seen), count = why, int((blocks.bad > 0).sum())
            used = f"{count} of {blocks.bad.size} blocks, first {seen.place}: {seen.used:.6g} was used"
            return wrong_at(rules.SCALE, unit, used, f"{seen.stored:.6g} is stored", how=how)
        found_values = Scaled(unit.view, scales, kind.format.block)
        instead = holds(found_values, source, self._others(pair))
        if instead:
            return wrong_at(rules.ORDER, unit, _names(pair), instead, what=instead)
        assert blocks.first is not None
        row, column, expected, found = blocks.first
        where = f"{expected:.6g} at row {row}, column {column}"
        finding = wrong_at(
            rules.VALUES, unit, where, f"{found:.6g}{_at(unit)}", count=blocks.off, **_like(found_values, source)
        )
        if self._through or compare(source, unit.view, scales, kind._replace(through="BF16")).off:
            return finding
        return replace(finding, fix="where the source is cast to bfloat16 first, as here, give --through bfloat16.")

    def _plain(self, pair: pairing.Pair, unit: pairing.Unit, source: Matrix) -> Iterator[Finding]:
        """Yield what is wrong with a weight in high precision, which is the source rounded to its dtype."""
        view, count, first, lost = unit.view, 0, None, 0
        for start, stop in pieces(view.shape):
            x, found = source.values(start, stop), view.values(start, stop)
            wanted = rounded(rounded(x, self._through) if self._through else x, view.held.dtype)
            off = ~((wanted == found) | (np.isnan(wanted) & np.isnan(found)))
            lost += found.size - int(np.isfinite(found).sum())
            if first is None and off.any():
                row, column = (int(each) for each in np.argwhere(off)[0])
                first = start + row, column, float(wanted[row, column]), float(found[row, column])
            count += int(off.sum())
        if lost:
            yield wrong_at(rules.NUMBER, unit, "numbers", "NaN or infinity", count=lost, where="")
        if first is None or lost:
            return
        instead = holds(view, source, self._others(pair))
        if instead:
            yield wrong_at(rules.ORDER, unit, _names(pair), instead, what=instead)
            return
        expected, dtype = f"{first[2]:.6g} at row {first[0]}, column {first[1]}", TORCH_NAMES[view.held.dtype]
        yield wrong_at(
            rules.ROUNDED, unit, expected, f"{first[3]:.6g}{_at(unit)}", count=count, dtype=dtype, **_like(view, source)
        )

    def _others(self, pair: pairing.Pair) -> Iterator[Other]:
        """Yield weights of the source that a wrong one may be: of its shape, those of its kind first. Of many, none."""
        own, last = {unit.name for unit, _, _ in pair.source}, pair.name.split(".")[-2:]
        kin = self._by_shape.get(pair.exported.view.shape, []) if self._searches > 0 else []
        self._searches -= 1
        for unit in sorted(kin, key=lambda unit: unit.name.split(".")[-2:] != last):
            if unit.name not in own:
                yield Other(unit.given, pairing.matrix_of([(unit, 0, unit.view.shape[0])], self._asked.source_format))


def _like(found: Matrix, source: Matrix) -> dict[str, str]:
    return {"like": "" if is_like(found, source) else ", and it is nothing like the source"}


def _at(unit: pairing.Unit) -> str:
    where = unit.view.held.where
    return f" in {where}" if where else ""


def _names(pair: pairing.Pair) -> str:
    return " and ".join(unit.given for unit, _, _ in pair.source)


def _words(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _first(wrong: Array) -> tuple[int, ...]:
    """Return the first block where something is wrong."""
    return tuple(map(int, np.argwhere(wrong)[0]))


def _shape(unit: pairing.Unit, source: Matrix) -> Finding:
    here, there = _words(unit.view.shape), _words(source.shape)
    why = ": it is transposed" if unit.view.shape == source.shape[::-1] else ""
    return wrong_at(rules.SHAPE, unit, there, here, here=here, there=there, why=why)


def _scale_shape(unit: pairing.Unit, form: Format, found: str) -> Finding:
    assert unit.scale is not None
    down, across = form.blocks(*unit.view.shape)
    expected, why = f"{down}x{across}", f": one scale for each {form.block_words}"
    padded = -(-down // 128) * 128 * -(-across // 4) * 4
    if found == f"{across}x{down}":
        why = ": it is transposed"
    elif form.block == (1, 32) and unit.scale.shape[0] * unit.scale.shape[1] == padded != down * across:
        why = ": it has the size of the swizzled layout of kernels"
    scale = pairing.Unit(unit.scale.held.name, unit.scale)
    return wrong_at(rules.SHAPE, scale, expected, found, here=found, there=expected, why=why)


def _of_scales(rule: Rule, unit: pairing.Unit, scales: Array, wrong: Array, expected: str) -> Finding:
    place = _first(wrong)
    return wrong_at(rule, unit, expected, f"{float(scales[place]):.6g} of block {place}", count=int(wrong.sum()))


def _too_large(unit: pairing.Unit, blocks: Blocks, kind: Kind) -> Iterator[Finding]:
    """Yield the finding about blocks that use less of the range than any way to round a scale leaves.

    torchao's CEIL rounds up the amax and divides by the largest power of two: 256 of 448, of which half may be unused.
    """
    largest = FLOATS[kind.dtype].largest
    least = 2 ** np.floor(np.log2(largest)) / 2 if kind.format.power_of_two else largest / 2
    wide = (blocks.amax > CLAMPED) & (blocks.largest < least)
    if wide.any():
        place = _first(wide)
        expected = f"a largest value of {least:g} to {largest:g} in block {place}"
        yield wrong_at(rules.WIDE, unit, expected, f"{blocks.largest[place]:g}")
