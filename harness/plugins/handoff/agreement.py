"""Whether a second list converts the same modules in the same way: a `quantization_config`, rules of an engine, a dump.

Whoever reads a list takes its names exactly, as a prefix, as a part, or as a regular expression. So the same list
converts other modules elsewhere; names that only some of these rules take are said.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import HarnessError
from harness.plugins.handoff import rules
from harness.plugins.handoff.formats import weights_of
from harness.plugins.handoff.numbers import QUANTIZED, TORCH_NAMES
from harness.plugins.handoff.pairing import FUSED, Unit, units_of
from harness.plugins.handoff.reading import read_words
from harness.plugins.handoff.tensors import State
from harness.text import counted
from harness.verdict import Finding

HIGH = "high precision"
_SHOWN = 3
_FIELDS = ("precision", "block", "scale", "activation")
# What is no linear, and what no list has to name.
_NO_LINEAR = re.compile(r"(^|\.)(embed_tokens|wte|wpe|tok_embeddings)$|norm\w*$|(^|\.)(ln_\w+)$")


class Converted(NamedTuple):
    """How one module is converted; what is not known is empty, and not compared."""

    precision: str  # of its weight, as torch calls it, or HIGH
    block: str = ""  # that shares a scale: "128x128", "row", "tensor"
    scale: str = ""  # its dtype
    activation: str = ""  # "dynamic" or "static"


def _regex(entry: str, name: str) -> bool:
    try:
        return re.match(entry.removeprefix("re:"), name) is not None
    except re.error:
        return False


def _as_transformers(entry: str, name: str) -> bool:
    """As `should_convert_module` of transformers 5.24: a regular expression up to a dot, or the end of the name."""
    return _regex(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", name) or name.endswith(entry)


# By name, whether an entry of a list takes a module.
MATCHERS: Mapping[str, Callable[[str, str], bool]] = {
    "exact": lambda entry, name: entry == name,
    "prefix": lambda entry, name: name == entry or name.startswith(f"{entry}."),
    "substring": lambda entry, name: entry in name,
    "regex": _regex,
    "segment": lambda entry, name: f".{entry}." in f".{name}.",
    "wildcard": lambda entry, name: fnmatch.fnmatchcase(name, entry),
    "compressed-tensors": lambda entry, name: _regex(entry, name) if entry.startswith("re:") else entry == name,
    "transformers": _as_transformers,
    "vllm": lambda entry, name: entry == name or (".experts." in f"{name}." and name.startswith(f"{entry}.")),
    "sglang": lambda entry, name: f".{entry}." in f".{name}.",
    "torchao": lambda entry, name: entry in name,
}
_COMPARED = ("exact", "prefix", "substring", "regex")


class ConvertedList(NamedTuple):
    """A second list: what each module is by name, or how all are but those that an entry takes."""

    origin: str
    modules: Mapping[str, Converted]
    default: Converted
    ignored: Sequence[str]
    matcher: str

    def of(self, module: str) -> Converted | None:
        """Return what a module is by this list; None where it says nothing."""
        if self.modules:
            return self.modules.get(module)
        taken = any(MATCHERS[self.matcher](entry, module) for entry in self.ignored)
        return Converted(HIGH) if taken else self.default


class Agreement(NamedTuple):
    findings: Sequence[Finding]
    notes: Sequence[str]


def read_list(given: str | PathLike[str] | Mapping[str, Any], matched_by: str = "") -> ConvertedList:
    """Return a second list. HarnessError for one that is none of those that are known."""
    where = "agrees_with" if isinstance(given, Mapping) else fspath(given)
    words = given if isinstance(given, Mapping) else read_words(Path(fspath(given)))
    if matched_by and matched_by not in MATCHERS:
        fix = f"give {', '.join(MATCHERS)}."
        raise HarnessError(f"no rule is named '{matched_by}'.", where="--matched-by", fix=fix)
    words = {"ignored_layers": words} if isinstance(words, list) else words
    if not isinstance(words, Mapping):
        fix = "give a quantization_config or a dump."
        raise HarnessError("it is no list and no configuration.", where=where, fix=fix)
    if isinstance(words.get("modules"), dict):
        return ConvertedList(where, dict(_dumped(words["modules"], where)), Converted(""), (), "exact")
    config = words.get("quantization_config", words.get("quantization", words))
    if not isinstance(config, Mapping) or not _KEYS & config.keys():
        fix = f"give a quantization_config, a dump, or one of {', '.join(sorted(_KEYS))}."
        raise HarnessError("it does not say what is converted.", where=where, fix=fix)
    method = str(config.get("quant_method", config.get("quant_algo", ""))).lower()
    matcher = matched_by or {"compressed-tensors": "compressed-tensors", "fp8": "transformers"}.get(method, "")
    if not matcher:
        matcher = "wildcard" if "exclude_modules" in config else "exact"
    return ConvertedList(where, {}, _default(config, method), tuple(_entries(config)), matcher)


_LISTS = ("ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules", "filter_fqns")
_KEYS = {"quant_method", "quant_algo", *_LISTS}


def _entries(config: Mapping[str, Any]) -> Iterator[str]:
    for key in _LISTS:
        yield from (str(entry) for entry in config.get(key) or ())


def _default(config: Mapping[str, Any], method: str) -> Converted:
    """Return how a configuration converts what no entry takes."""
    block, words = config.get("weight_block_size"), "tensor" if method == "fp8" else ""
    activation = str(config.get("activation_scheme", ""))
    if method == "compressed-tensors":
        weights, dynamic = weights_of(config), weights_of(config, "input_activations").get("dynamic")
        block, words = weights.get("block_structure"), str(weights.get("strategy", "")).replace("channel", "row")
        activation = "" if dynamic is None else "dynamic" if dynamic else "static"
    scale = "float8_e8m0fnu" if config.get("scale_fmt") == "ue8m0" else ""
    return Converted("float8_e4m3fn", "x".join(map(str, block)) if block else words, scale, activation)


def _dumped(modules: Mapping[str, Any], where: str) -> Iterator[tuple[str, Converted]]:
    for name, fields in modules.items():
        known = isinstance(fields, dict) and fields.keys() <= {*_FIELDS}
        if not known or not all(isinstance(value, str) for value in fields.values()):
            raise HarnessError(f"{name} has other fields.", where=where, fix=f"give {', '.join(_FIELDS)} as text.")
        yield name, Converted(**{"precision": HIGH, **fields})


def converted_in(state: State) -> dict[str, Converted]:
    """Return how each linear of a state is stored, by the name of its module."""
    config, found = state.quantization, dict[str, Converted]()
    activation = str(config.get("activation_scheme", ""))
    for unit in units_of(state).by_name.values():
        module = _module(unit)
        is_float8 = unit.view.held.dtype in QUANTIZED
        if is_float8 and unit.scale is not None:
            scale = TORCH_NAMES[unit.scale.held.dtype]
            found[module] = Converted(TORCH_NAMES[unit.view.held.dtype], _block(unit), scale, activation)
        elif min(unit.view.shape) > 1 and not _NO_LINEAR.search(module):
            found[module] = Converted(TORCH_NAMES[unit.view.held.dtype] if is_float8 else HIGH)
    return found


def _module(unit: Unit) -> str:
    """Return the module of a weight: as its state calls it, and with the number of the expert in a stack."""
    given = unit.name if unit.view.at else unit.view.held.name.replace("._weight_qdata", ".weight")
    return given.removesuffix(".weight")


def _block(unit: Unit) -> str:
    """Return how many values share a scale, by the shapes of both."""
    assert unit.scale is not None
    (rows, columns), (down, across) = unit.view.shape, unit.scale.shape
    if down * across == 1:
        return "tensor"
    if down * across == rows:
        return "row"
    sizes = [
        next((size for size in (1, 32, 64, 128, 256) if -(-of // size) == count), 0)
        for of, count in ((rows, down), (columns, across))
    ]
    return "x".join(map(str, sizes))


def agreement(state: State, other: ConvertedList) -> Agreement:
    """Compare how each linear is stored with a second list."""
    ours = converted_in(state)
    found = list(_disagreements(ours, other))
    for name in sorted(other.modules.keys() - ours.keys()):
        there = other.modules[name].precision
        found.append(rules.CONVERTED.finding(module=name, here="not there", there=there, list=other.origin))
    found += _fused(ours)
    notes = list(_ambiguous(other.ignored, ours))
    compared = sum(other.of(name) is not None for name in ours)
    first = f"{counted(compared, 'module')} beside {other.origin}, its names taken as {other.matcher}"
    return Agreement(found, [first, *notes])


def _disagreements(ours: Mapping[str, Converted], other: ConvertedList) -> Iterator[Finding]:
    for name, here in ours.items():
        there = other.of(name)
        if there is None or (name.endswith("lm_head") and here.precision == HIGH):
            continue  # no list has to name the head
        if here.precision != there.precision:
            taken = [entry for entry in other.ignored if MATCHERS[other.matcher](entry, name)]
            expected = there.precision + (f", taken by {taken[0]!r}" if taken else "")
            values: dict[str, Any] = {"here": here.precision, "there": there.precision, "list": other.origin}
            fix, found = _fix(name, other), here.precision
            yield rules.CONVERTED.finding(module=name, expected=expected, found=found, fix=fix, values=values)
            continue
        for field in _FIELDS[1:]:
            mine, theirs = getattr(here, field), getattr(there, field)
            if here.precision != HIGH and mine and theirs and mine != theirs:
                values = {"field": _WORDS[field], "here": mine, "there": theirs, "list": other.origin}
                yield rules.AGREES.finding(module=name, expected=theirs, found=mine, values=values)


_WORDS = {"block": "the block", "scale": "the dtype of the scale", "activation": "the scheme of activations"}


def _fix(name: str, other: ConvertedList) -> str | None:
    """Return what to write, where an entry takes this module by one rule and not by another."""
    for entry in other.ignored:
        by = {rule: MATCHERS[rule](entry, name) for rule in dict.fromkeys((*_COMPARED, other.matcher))}
        if len({*by.values()}) > 1:
            yes, no = (", ".join(rule for rule, takes in by.items() if takes is wanted) for wanted in (True, False))
            return f"write whole names: {entry!r} takes it by {yes}, and not by {no}."
    return None


def _fused(ours: Mapping[str, Converted]) -> Iterator[Finding]:
    """Yield the layers that engines fuse, of which only some parts are converted."""
    for fused, parts in FUSED.items():
        for name in (name for name in ours if name.endswith(f".{parts[0]}")):
            stem = name.removesuffix(parts[0])
            kinds = {part: ours[stem + part].precision for part in parts if stem + part in ours}
            if len(set(kinds.values())) > 1:
                listed = ", ".join(f"{part} {kind}" for part, kind in kinds.items())
                yield rules.FUSED_PARTS.finding(module=stem + fused, expected="one precision", found=listed)


def _ambiguous(entries: Iterable[str], names: Iterable[str]) -> Iterator[str]:
    """Yield the entries that take other modules by another rule."""
    names = list(names)
    for entry in entries:
        taken = {rule: {name for name in names if MATCHERS[rule](entry, name)} for rule in _COMPARED}
        if len({frozenset(each) for each in taken.values()}) > 1:
            yield f"{entry!r} takes {'; '.join(_words(rule, each) for rule, each in taken.items())}"


def _words(rule: str, names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{rule}: {shown}{more}" if names else f"{rule}: nothing"
