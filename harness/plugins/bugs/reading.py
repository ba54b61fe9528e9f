"""The one reader of configurations: what settings state and agree on, and an account of every line.

Nothing is executed.
"""

import datetime
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from harness.matrix.axes import SCOPE, OutOfScope
from harness.matrix.recipes import OPERAND_FIELDS, Operand
from harness.plugins.bugs.report import Block, Report, clean_words, python_tree
from harness.plugins.bugs.settings import (
    MOST,
    UNREAD,
    Code,
    Command,
    Setting,
    Source,
    commands_of,
    printed_settings,
    read_code,
    settings_of_block,
)
from harness.plugins.bugs.spellings import (
    Known,
    Value,
    asked_by_call,
    asked_by_option,
    has_no_effect,
    is_toml_of_torchtitan,
    known,
    names_experts,
    plain_key,
    shown,
    subject,
)

ROUNDED = "round_scales_to_power_of_2"
_SETTINGS = {"DISABLED": "dis", "AXISWISE": "axs", "TENSORWISE": "ten"}
_DTYPES = {"float8_e4m3fn": "e4m3", "e4m3_dtype": "e4m3", "float8_e5m2": "e5m2", "e5m2_dtype": "e5m2"}
_OWNERS: Mapping[Operand, Operand] = {"i_gw": "i", "w_gi": "w", "go_gw": "go"}  # whose config they have by default
_ZERO = next(feature for feature in SCOPE if feature.name == "ZeRO stage 1 or 2")
_FSDP1 = next(feature for feature in SCOPE if feature.name == "FSDP1")
_EXPERTS = frozenset({"model_size", "model_name", "config_file"})  # facts whose value names a model


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """A value of a fact, and the words that say so."""

    fact: str
    value: Value
    words: str
    source: Source


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a configuration in the account: its name and words, and what it states, or why it has no effect.

    `about`: what a line that is not understood names and must not be passed over.
    """

    name: str
    words: str
    why: str = ""
    about: str = ""

    @property
    def text(self) -> str:
        return f"{self.words}: {self.why}" if self.why else self.words


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Every line of the configurations and commands: used, known and without effect here, or not understood."""

    used: tuple[Line, ...] = ()
    without_effect: tuple[Line, ...] = ()
    not_understood: tuple[Line, ...] = ()


class Reading:
    """What the configurations of a report say. `outside`: what they ask for and no case has, with the words."""

    def __init__(self, report: Report, day: datetime.date) -> None:
        self.statements: list[Statement] = []
        self.outside: dict[str, str] = {}
        self.differ: tuple[str, ...] = ()  # facts that some commands state and others do not
        self.configurations: tuple[str, ...] = ()  # functions of which one was run
        self._day = day
        self._used: dict[str, Line] = {}
        self._without: dict[str, Line] = {}
        self._unknown: dict[str, Line] = {}
        self._commands: list[frozenset[str]] = []  # the facts of each
        self._tools: Counter[str] = Counter()
        self._casts: dict[str, object] = {}
        self.is_toml = False  # of torchtitan, which ended with 0.2.2
        for block in report.blocks:
            self._read(block)
        if self._casts:
            self._operands(self._casts)
        self._one_command()
        self._which_fsdp()

    @property
    def account(self) -> Account:
        lines = (tuple(lines.values()) for lines in (self._used, self._without, self._unknown))
        return Account(**dict(zip(Account.__struct_fields__, lines, strict=True)))

    @property
    def tool(self) -> str:
        """The tool whose options these are; "" for none that has defaults of its own."""
        return next((tool for tool, _ in self._tools.most_common()), "")

    def _read(self, block: Block) -> None:
        if block.kind == "shell" and not block.broken:
            for command in commands_of(block.text):
                self._command(command)
            self._all(printed_settings(block.text))
        elif block.kind == "python" and not block.broken:
            self._code(read_code(python_tree(block.text)))
        else:
            self._all(settings_of_block(block))

    def _all(self, settings: Iterable[Setting]) -> None:
        for count, setting in enumerate(settings):
            if count == MOST:
                self._unknown["…"] = Line(name="…", words=f"lines after the first {MOST}", about="length")
                return
            self._setting(setting)

    def _command(self, command: Command) -> None:
        before = len(self.statements)
        if command.tool:
            self._tools[command.tool] += 3
        self._all(command.settings)
        facts = frozenset(statement.fact for statement in self.statements[before:])
        if facts and command.starts:
            self._commands.append(facts)

    def _code(self, code: Code) -> None:
        self._all(code.settings)
        self.configurations = code.configurations if len(code.configurations) > 1 else ()
        for name in (*code.calls, *code.names):
            self._refuse(asked_by_call(name), name)
        for name in code.names:
            if name.rpartition(".")[2] == "fully_shard":  # of how many ranks is asked, where the rest is not there
                self._setting(Setting(names=("fully_shard()",), value=True, words=f"import of {name}", counted=False))
        order = [name.rpartition(".")[2] for name in code.calls]
        first = [name for name in dict.fromkeys(order) if name in ("quantize_", "parallelize_module")]
        if len(first) == 2:
            self._state("convert_after_tp", first[1] == "quantize_", f"{first[0]} before {first[1]}", "config")

    # One setting

    def _setting(self, setting: Setting) -> None:
        names = tuple(map(plain_key, setting.names))
        words = clean_words(setting.words)
        if self._is_cast(names, setting.value):
            self._used.setdefault(words, Line(name=setting.names[0], words=words, why="casts"))
            return
        found = max((known(name, self._day) for name in names), key=lambda known_name: known_name.length)
        self.is_toml = self.is_toml or any(map(is_toml_of_torchtitan, names))
        outside = None if setting.value == UNREAD else asked_by_option(names, setting.value)
        if outside is not None:
            self._refuse(outside, words)
            self._used[words] = Line(name=setting.names[0], words=words, why=f"refused: {outside.name}")
        elif setting.broken:
            self._not_understood(setting, names, words, f": {setting.broken}")
        elif str(setting.value) in ("", "null", "~"):
            self._no_effect(setting, words, "it sets nothing", is_known=bool(found.length))
        elif why := next(filter(None, (has_no_effect(name, setting.value) for name in names)), ""):
            self._no_effect(setting, words, why)
        elif found.spellings:
            self._meant(setting, found, names, words)
        elif found.why:
            self._no_effect(setting, words, found.why)
        else:
            self._not_understood(setting, names, words)

    def _meant(self, setting: Setting, found: Known, names: tuple[str, ...], words: str) -> None:
        read = [None if setting.value == UNREAD else row.read(setting.value) for _, row in found.spellings]
        facts = {fact: value for meant in read if meant for fact, value in meant.items()}
        if all(meant is None for meant in read):
            known_as = " or ".join(dict.fromkeys(row.fact for _, row in found.spellings))
            self._not_understood(setting, names, words, f": which {known_as} is it?", about=known_as)
        elif not facts:
            self._no_effect(setting, words, "it sets nothing")
        else:
            tools = {tool for tool, row in found.spellings if row.fact in facts} - {"other", "torch", "torchao"}
            if len(tools) == 1:
                self._tools[tools.pop()] += 1
            for fact, value in facts.items():
                self._state(fact, value, words, setting.source)
                if fact in _EXPERTS and names_experts(str(value)):
                    self._state("experts_used", True, words, setting.source)
            self._used[words] = Line(name=setting.names[0], words=words, why=", ".join(facts))

    def _no_effect(self, setting: Setting, words: str, why: str, *, is_known: bool = True) -> None:
        name = setting.names[0]
        if name.startswith("$"):  # it may be about a secret
            name = words = "a variable of the shell"
        if setting.counted or is_known:
            self._without.setdefault(words, Line(name=name, words=words, why=why))

    def _not_understood(
        self, setting: Setting, names: tuple[str, ...], words: str, why: str = "", *, about: str = ""
    ) -> None:
        texts = (*names, setting.value) if setting.counted else names
        about = about or next(filter(None, (subject(text) for text in texts if isinstance(text, str))), "")
        if setting.counted or about:
            shown = f"{setting.names[0].lstrip('$')}=…" if setting.names[0].startswith("$") else words
            self._unknown.setdefault(shown, Line(name=setting.names[0], words=shown, why=why.lstrip(": "), about=about))

    def _state(self, fact: str, value: Value, words: str, source: Source) -> None:
        kept = clean_words(value) if isinstance(value, str) else value
        self.statements.append(Statement(fact=fact, value=kept, words=clean_words(words), source=source))

    def _refuse(self, outside: OutOfScope | None, words: str) -> None:
        if outside is not None:
            self.outside.setdefault(outside.name, f"{outside.reason} ({clean_words(words)})")

    # What several settings say together

    def _one_command(self) -> None:
        """What some commands state and others do not is no statement."""
        if self._commands:
            stated = frozenset[str]().union(*self._commands)
            some = {fact for fact in stated if not all(fact in facts for facts in self._commands)}
            self.differ = tuple(sorted(some))
            self.statements = [of for of in self.statements if of.source != "flag" or of.fact not in some]

    def _which_fsdp(self) -> None:
        """FSDP of accelerate and transformers is FSDP1 unless a version is given. FSDP2 stands for stage 3 of ZeRO."""
        facts = {statement.fact: statement for statement in self.statements}
        unnamed, zero = facts.get("unversioned_fsdp"), facts.get("zero")
        if "fsdp" in facts:
            self.outside.pop(_FSDP1.name, None)
        elif unnamed is not None:
            self._refuse(_FSDP1, f"{unnamed.words} without fsdp_version: 2")
        if zero is not None and zero.value in (1, 2):
            self._refuse(_ZERO, zero.words)

    # Float8 of single operands

    def _is_cast(self, names: tuple[str, ...], value: object) -> bool:
        """Note an option of one operand of `Float8LinearConfig`."""
        for name in names:
            match = re.search(rf"(?:^|\.)(cast_config_\w+\.\w+|{ROUNDED})$", name)
            if match:
                self._casts[match[1]] = value
                return True
        return False

    def _operands(self, stated: Mapping[str, object]) -> None:
        """A cast for every operand; settings that the recipe implies have no spelling in a case."""
        own = {operand: tuple(_cast_settings(stated, field)) for operand, field in OPERAND_FIELDS.items()}
        if not any(own.values()):
            return
        options = [(key, str(value).rpartition(".")[2]) for key, value in stated.items() if key != ROUNDED and value]
        words = ", ".join(f"{key}={last}" for key, last in options)
        casts = {operand: own[operand] or own[_OWNERS.get(operand, operand)] for operand in own}
        rows = any("axs" in settings for settings in casts.values())
        scaling = {operand: next((one for one in casts[operand] if len(one) == 3), "ten") for operand in casts}
        spelled = [f"{operand}:{setting}" for operand, setting in scaling.items()]
        spelled.append(f"go:{next((setting for setting in casts['go'] if len(setting) == 4), 'e5m2')}")
        self._state("recipe", "rowwise" if rows else "tensorwise", words, "config")
        self._state("casts", tuple(spelled), words, "config")
        if rows and stated.get(ROUNDED) is not True:
            self._state(ROUNDED, False, words, "config")


def _cast_settings(stated: Mapping[str, object], field: str) -> Iterator[str]:
    """Yield the settings that a CastConfig of this field has: `axs`, `dis`, a dtype."""
    known_settings = _SETTINGS | _DTYPES
    for key, value in stated.items():
        last = str(value).rpartition(".")[2]
        if key.startswith(f"{field}.") and last in known_settings:
            yield known_settings[last]


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What statements agree on, what they contradict each other in, and what was passed over, with the reason."""

    facts: Mapping[str, Statement]
    contradictions: Mapping[str, tuple[Statement, ...]]
    ignored: tuple[str, ...]


def resolve(statements: Iterable[Statement]) -> Resolved:
    """Return what statements agree on: flags override a configuration, and two values of the same rank contradict."""
    by_fact: dict[str, list[Statement]] = {}
    for statement in statements:
        by_fact.setdefault(statement.fact, []).append(statement)
    facts: dict[str, Statement] = {}
    contradictions: dict[str, tuple[Statement, ...]] = {}
    ignored: dict[str, None] = {}
    for fact, stated in by_fact.items():
        kept = [statement for statement in stated if statement.source == "flag"] or stated
        first = {statement.value: statement for statement in reversed(kept)}
        if len(first) > 1:
            contradictions[fact] = tuple(statement for statement in kept if first[statement.value] is statement)
        facts[fact] = kept[0]
        for other in stated:
            if other.value not in first:
                why = "a flag overrides the configuration"
                ignored[f"{fact} = {shown(other.value)}: {other.words}: {why}"] = None
    return Resolved(facts=facts, contradictions=contradictions, ignored=tuple(ignored))
