"""Records about cases: known upstream faults, cases that may fail for a while, and what a release must show.

Owns the formats of `cases/known.toml`, `cases/quarantine.toml` and `cases/required.toml`. `checks/judge.py` compares
findings with known faults. A fault explains nothing but what it lists: a finding of another check, of another module or
of a larger size is a new fault, and so is a listed one that is missing.

    [[fault]]
    name = "..."                  # short, unique
    where = "tp>1 recipe=rowwise" # a selector: the affected cases
    verdict = "numeric"           # how they end: numeric, invariant, crash or hang
    requires = [                  # the findings by which the fault is recognized: each must be there
      {rule = "graphs/rows", values = {operator = "fused_scaled_matmul_reduce_scatter"}},
    ]
    may_cause = [                 # what may follow from it, and how large it may be
      {rule = "parity/gradients", at_most = 0.4},
    ]
    link = "https://..."          # the report
    torch = ">=2.13,<2.14"        # the affected versions; `torchao` and `torchtitan` likewise, at least one of them.
                                  # `harness/sources.py` says what that means for nightlies and builds of a commit
    review_by = 2027-03-01        # after this day the record explains nothing: look whether it is still true
    fix = "cases/fixes/x.py:apply"  # optional: with it, every check must pass
    reason = "..."                # one sentence: the cause
    may_show = ["compile=inductor"] # optional: selectors, of the affected cases those that may show it and need not

`rule` is the rule of a check (`explain --list checks` lists them), or one of "engine/..." for how ranks ended.
`module`, `operand` and `values` are compared with those of the finding. A list stands for any of its texts, and `*`, in
the rule as well, for anything; what is not given may be anything. `at_most` is in the unit of the finding's size; a
finding without a size is not explained by a symptom with `at_most`.

    [[quarantine]]                    # runs and is reported, and until a day fails neither `run` nor `compare`
    id = "tp2-rowwise-v2048-b16"      # one case, or
    select = "async_tp=true tp=8"     # a selector
    owner = "ana"                     # who will end it
    reason = "..."                    # one sentence
    link = "https://..."              # optional: where it is worked on
    expires = 2027-03-01              # after this day the cases count again

    [[required]]                      # what a candidate must have shown before it is released
    name = "TP in bfloat16"           # short, unique
    select = "tp>1 dtype=bfloat16"    # or id = "..."
    at_least = 3                      # so many of these cases must be good; 1 if not given
    max_age_days = 7                  # optional: of a run that is not older
    reason = "..."                    # one sentence: why it is required
"""

import datetime
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Self, TypeVar

import msgspec
from msgspec import Meta
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from harness.errors import HarnessError
from harness.matrix.axes import suggestion
from harness.matrix.case import Case
from harness.matrix.caseid import case_id, parse_case_id
from harness.matrix.rules import Rule
from harness.matrix.selector import axes_read, parse_selector
from harness.matrix.tomlfile import TomlFile, parse_toml, read_toml_file, read_toml_text
from harness.registry import is_llama
from harness.sources import is_among
from harness.verdict import Finding, Verdict, check_of

_FAILURES = tuple(verdict.value for verdict in (Verdict.NUMERIC, Verdict.INVARIANT, Verdict.CRASH, Verdict.HANG))
PACKAGES = ("torch", "torchao", "torchtitan")
_SYMPTOM = '{rule = "parity/gradients", at_most = 0.5}'


class Symptom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of finding: its rule, and optionally its module, operand, values and largest size."""

    rule: str
    module: str | None = None
    operand: str | tuple[str, ...] | None = None
    values: Mapping[str, str | tuple[str, ...]] = {}
    at_most: float | None = None

    @property
    def check(self) -> str:
        return check_of(self.rule)

    def explains(self, finding: Finding) -> bool:
        return (
            fnmatchcase(finding.rule, self.rule)
            and (self.module is None or fnmatchcase(finding.module or "", self.module))
            and (self.operand is None or _is_one_of(finding.operand, self.operand))
            and all(_is_one_of(finding.values.get(name, ""), texts) for name, texts in self.values.items())
            and (self.at_most is None or (finding.size is not None and finding.size <= self.at_most))
        )

    def __str__(self) -> str:
        operand = self.operand if isinstance(self.operand, str | None) else " or ".join(self.operand)
        places = (operand, self.module, *(f"{name} {texts}" for name, texts in self.values.items()))
        about = ", ".join(str(place) for place in places if place is not None)
        size = "" if self.at_most is None else f", at most {self.at_most:g}"
        return f"{self.rule}{f' about {about}' if about else ''}{size}"


def _is_one_of(value: object, texts: str | tuple[str, ...]) -> bool:
    return any(fnmatchcase(str(value), text) for text in ((texts,) if isinstance(texts, str) else texts))


class KnownFault(msgspec.Struct, frozen=True, kw_only=True):
    """One record. `torch`, `torchao` and `torchtitan` are version specifiers as for pip; empty is any version.

    `everywhere`: a target of one's own may show the fault, and a Llama must; so in other projects for every record of
    the package. Without it each case that the record selects must show it, except those that `may_show` selects.
    """

    name: str
    where: str
    verdict: Verdict
    requires: tuple[Symptom, ...]
    link: str
    review_by: datetime.date
    reason: str
    may_cause: tuple[Symptom, ...] = ()
    fix: str | None = None
    may_show: tuple[str, ...] = ()
    everywhere: bool = False
    torch: str = ""
    torchao: str = ""
    torchtitan: str = ""

    @property
    def specifiers(self) -> dict[str, str]:
        """Return the versions that have the fault, by package; of a package that is not in it any version."""
        return {package: text for package in PACKAGES if (text := getattr(self, package))}

    @property
    def versions(self) -> str:
        """Return the versions as text: "torch >=2.15 and torchao <0.18"."""
        return " and ".join(f"{package} {text}" for package, text in self.specifiers.items())

    def affects(self, installed: Mapping[str, str | None]) -> bool | None:
        """Return True if these versions have the fault; None for a pre-release that may have it.

        A package that is not installed is taken to be affected.
        """
        answers = {
            version is None or is_among(version, text)
            for package, text in self.specifiers.items()
            for version in (installed.get(package),)
        }
        return False if False in answers else None if None in answers else True

    def here(self, installed: Mapping[str, str | None]) -> Self | None:
        """Return the record as it holds for these versions; None if they do not have the fault.

        With a pre-release that may have it, each case that it selects may show it and need not.
        """
        affects = self.affects(installed)
        if affects is None:
            return msgspec.structs.replace(self, may_show=(self.where,))
        return self if affects else None

    def masks_new_findings(self, case: Case) -> bool:
        """Return True if the fault hides new findings in a case it affects: there is no fix to run it again with."""
        return self.fix is None and self.must_show(case)

    def must_show(self, case: Case) -> bool:
        """Return True if the case fails as recorded or the record is wrong; otherwise it explains what shows."""
        if any(parse_selector(selector).matches(case) for selector in self.may_show):
            return False
        return not self.everywhere or is_llama(case.target)

    def shows(self, findings: Iterable[Finding]) -> bool:
        return all(any(symptom.explains(finding) for finding in findings) for symptom in self.requires)

    def explains(self, finding: Finding) -> bool:
        """Return True if the finding is one that this fault shows itself by, or one that it may cause."""
        return any(symptom.explains(finding) for symptom in (*self.requires, *self.may_cause))


def read_known(path: Path) -> tuple[KnownFault, ...]:
    """Return the records of a file, in order. Raises HarnessError with the line for anything invalid."""
    return _records(read_toml_text(path), str(path))


@lru_cache(maxsize=16)  # one command reads the same records for several reasons
def _records(text: str, where: str) -> tuple[KnownFault, ...]:
    toml = parse_toml(text, where=where)
    toml.check_keys(table=toml.data, known=("fault", "without"))
    faults = tuple(_fault(toml, table, index) for index, table in enumerate(toml.tables("fault")))
    toml.check_distinct([fault.name for fault in faults], "fault", "name", noun="faults")
    return faults


def known_with_shipped(own: Path, shipped: Path) -> tuple[KnownFault, ...]:
    """Return the records of a project, and those of the package as `everywhere`, with their fixes by absolute path.

    A record of the same name in the project replaces one of the package, `without` in it switches one off. Raises
    HarnessError as `read_known` does, and for a name in `without` that the package does not have.
    """
    faults = read_known(own) if own.exists() else ()
    if not shipped.exists() or (own.exists() and own.samefile(shipped)):
        return faults
    others = {
        fault.name: msgspec.structs.replace(
            fault, everywhere=True, fix=fault.fix and str(shipped.parents[1] / fault.fix)
        )
        for fault in read_known(shipped)
    }
    dropped = {*(_without(own, others) if own.exists() else ()), *(fault.name for fault in faults)}
    return (*faults, *(fault for name, fault in others.items() if name not in dropped))


def _without(path: Path, shipped: Collection[str]) -> list[str]:
    toml = read_toml_file(path)
    names = toml.data.get("without", [])
    if not isinstance(names, list):
        raise toml.error("without", what="'without' must be a list of names.", fix='write without = ["name"].')
    for name in names:
        if name not in shipped:
            what = f"the package has no record '{name}'."
            raise toml.error("without", what=what, fix=suggestion(str(name), shipped))
    return names


def matching(faults: Sequence[KnownFault], case: Case) -> tuple[KnownFault, ...]:
    """Return every record that affects a case, in order. The caller filters by version (`affects`)."""
    return tuple(fault for fault in faults if parse_selector(fault.where).matches(case))


class KnownRule(Rule, frozen=True):
    """The cases in which a record masks new findings, as a rule of the matrix: they run, but prove nothing new."""

    def applies(self, case: Case) -> bool:
        """Return True for the cases that the record selects, whatever their model."""
        return bool(self.when(case))


def known_rules(faults: Iterable[KnownFault]) -> list[KnownRule]:
    """Return the rules of the records without a fix. HarnessError if a selector asks for ids instead of axis values."""
    return [_known_rule(fault) for fault in faults if fault.fix is None]


def _known_rule(fault: KnownFault) -> KnownRule:
    selector = parse_selector(fault.where)
    return KnownRule(
        name=fault.name,
        reason=fault.reason,
        source=fault.link,
        axes=tuple(dict.fromkeys((*axes_read(selector), "target"))),
        when=lambda case: selector.matches(case) and fault.masks_new_findings(case),
    )


def _fault(toml: TomlFile, table: object, index: int) -> KnownFault:
    given = table.get("verdict", "") if isinstance(table, dict) else ""
    fixes = {**_FIXES, "verdict": suggestion(str(given), _FAILURES)}
    fault = toml.record(KnownFault, table, "fault", index, fixes=fixes)
    if fault.verdict.value not in _FAILURES:
        what = f"verdict '{fault.verdict.value}' is not a failure."
        raise toml.error("fault", index, "verdict", what=what, fix=fixes["verdict"])
    if not fault.requires:
        what = "'requires' must name at least one finding by which the fault is recognized."
        raise toml.error("fault", index, "requires", what=what, fix=_FIXES["requires"])
    try:
        for selector in (fault.where, *fault.may_show):
            parse_selector(selector)
    except HarnessError as error:
        raise toml.error("fault", index, what=error.what, fix=error.fix) from error
    _check_versions(toml, fault, index)
    return fault


_FIXES = {
    "review_by": "write review_by = 2027-03-01.",
    "requires": f"write requires = [{_SYMPTOM}].",
    "may_cause": f"write may_cause = [{_SYMPTOM}].",
}


def _check_versions(toml: TomlFile, fault: KnownFault, index: int) -> None:
    given = fault.specifiers
    if not given:
        what = "no version is named: a fault has a first and, one day, a last version."
        raise toml.error("fault", index, what=what, fix='write torch = ">=2.13,<2.14", or torchao.')
    for package, text in given.items():
        try:
            SpecifierSet(text)
        except InvalidSpecifier as error:
            what = f"'{text}' is not a version specifier."
            raise toml.error("fault", index, package, what=what, fix=f'write {package} = ">=2.13,<2.14".') from error


_LONG_DAYS = 366  # until the end of a quarantine; more is remarked on, because nobody will look again


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    id: str = ""
    select: str = ""

    def covers(self, case: Case) -> bool:
        return case_id(case) == self.id if self.id else parse_selector(self.select).matches(case)

    @property
    def which(self) -> str:
        return self.id or self.select


E = TypeVar("E", bound=Entry)


class Quarantine(Entry, frozen=True, kw_only=True):
    """One entry. It holds up to and including the day `expires`."""

    owner: str
    reason: str
    expires: datetime.date
    link: str = ""

    def holds(self, today: datetime.date) -> bool:
        return today <= self.expires

    def text(self, today: datetime.date) -> str:
        """Return why cases are excused, as the end of a sentence, with a remark where that lasts too long."""
        link = f" ({self.link})" if self.link else ""
        days = (self.expires - today).days
        remark = f". That is {days / 365.25:.1f} years away: set a date within a year" if days > _LONG_DAYS else ""
        return f"quarantined until {self.expires} by {self.owner}: {self.reason}{link}{remark}"

    @property
    def expired_text(self) -> str:
        return f"the quarantine by {self.owner} expired on {self.expires}: {self.reason}"


class Required(Entry, frozen=True, kw_only=True):
    """At least so many good cases, in a run that is not older than so many days."""

    name: str
    reason: str
    at_least: Annotated[int, Meta(gt=0)] = 1
    max_age_days: Annotated[float, Meta(gt=0)] | None = None


def read_quarantine(path: Path) -> tuple[Quarantine, ...]:
    """Return the entries of a file, in order; none where there is no file. Raises HarnessError with the line."""
    if not path.exists():
        return ()
    toml = read_toml_file(path)
    entries = toml.records("quarantine", Quarantine, fixes={"expires": "write expires = 2027-03-01."})
    return _checked(toml, "quarantine", entries)


def read_required(path: Path) -> tuple[Required, ...]:
    """Return the entries of a file, in order. Raises HarnessError with the line for anything invalid."""
    toml = read_toml_file(path)
    entries = toml.records("required", Required)
    toml.check_distinct([entry.name for entry in entries], "required", "name", noun="entries")
    return _checked(toml, "required", entries)


def quarantine_of(entries: Iterable[Quarantine], case: Case) -> Quarantine | None:
    """Return the entry about a case that expires last, or None."""
    return max((entry for entry in entries if entry.covers(case)), key=lambda entry: entry.expires, default=None)


def _checked(toml: TomlFile, table: str, entries: tuple[E, ...]) -> tuple[E, ...]:
    """Return the entries. HarnessError with the line where one names no cases, or cases that cannot be."""
    for index, entry in enumerate(entries):
        if bool(entry.id.strip()) == bool(entry.select.strip()):
            what = "an entry has either 'id', one case, or 'select', an expression."
            raise toml.error(table, index, what=what, fix='write id = "tp2-rowwise-v2048-b16", or select = "tp>1".')
        try:
            _ = parse_case_id(entry.id) if entry.id else parse_selector(entry.select)
        except HarnessError as error:
            raise toml.error(table, index, "id" if entry.id else "select", what=error.what, fix=error.fix) from error
    return entries
