"""The one reader of configurations: what TOML, YAML, flags, Python code and log lines state. Nothing is executed."""

from __future__ import annotations

import ast
import contextlib
import datetime
import re
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from harness.bugs.report import Piece, Report, clean_words, options_of_toml, python_tree
from harness.matrix.axes import AXES
from harness.matrix.layout import MESH_AXES
from harness.matrix.recipes import OPERAND_FIELDS, Operand
from harness.matrix.scope import FSDP1, SIZED, OutOfScope, asked_by_call, asked_by_option
from harness.matrix.spellings import Value, meaning, plain_key

ROUNDED = "round_scales_to_power_of_2"

# A flag overrides a configuration, as it does in torchtitan. What a shape implies is derived, everything else stated.
Source = Literal["flag", "config", "shape", "title", "prose"]

_FLAG = re.compile(r"""(?<![\w-])--([A-Za-z][\w.-]*)(?:(?:=|[ \t]+)("[^"\n]*"|'[^'\n]*'|(?!-)[^\s`]+))?""")
_OVERRIDE = re.compile(r"(?<![\w.\-])\+{0,2}([a-z]\w*(?:\.\w+)+)=([^\s\\\"'$]+)")  # of Hydra, behind a command
_LAUNCH = re.compile(r"\b(?:torchrun|run_(?:llama_)?train\.sh|accelerate launch|python3? |srun )")
_VARIABLE = re.compile(r"\b(NGPU|CONFIG_FILE|CONFIG|WORLD_SIZE)=[\"']?([\w./ -]*?)[\"']?(?=\s|$)")
_LINE = re.compile(
    r"^(\s*)(?:[-*+] +)?[\"']?([\w.-]+)[\"']?\s*(?:[:=]|\.{3,})\s*(.*?)\s*,?\s*(?:#.*|\s\(.*\))?$", re.ASCII
)
_SECTION = re.compile(r"^\s*\[([\w.]+)\]\s*$")
# Lines that torchtitan prints, such as `ModelArgs(dim=256, n_layers=8` and `parallelism: pp=1, dp_shard=2`.
_LOGGED = re.compile(r"(?:\w*Args\(|with parallelism: )((?:\w+=[\w.]+,? ?)+)")
# Sentences of its log, by the option that they tell.
_TOLD = (
    ("local_batch_size", r"\blocal batch size:? (\d+)"),
    ("global_batch_size", r"\bglobal batch size:? +(\d+)"),
    ("seq_len", r"\bsequence length:? (\d+)"),
    ("model.flavor", r"\bModel \w+ (\w+) size: [\d,]+ total"),
    ("activation_checkpoint.mode", r"\bApplied (\w+) activation checkpointing to"),
    ("enable_float8_linear", r"\bSwapped to Float8Linear layers"),
    ("enable_fsdp_float8_all_gather", r"\bSwapped to Float8Linear layers with enable_fsdp_float8_all_gather=(\w+)"),
)
_MESH = re.compile(r"device mesh with \[([^\]\n]{1,120})\], \[(\d{1,5}(?:, ?\d{1,5})*)\]")
_CASTS = re.compile(r"\bcast_configs=((?:(?:i|w|go)(?:_g[iw])?:(?:dyn|dis)_(?:ten|axs)_e\dm\d,?){1,6})")
_SHAPE = re.compile(r"(?:torch\.Size\()?\[(\d{1,7}(?:, ?\d{1,7}){1,2})\]\)?")
_INLINE = re.compile(
    r"\b(?:[\w.]*\.)?(?:Float8LinearConfig|from_recipe_name|convert_to_float8_training)\([^()\n]{0,300}\)"
)
_MOST = 5_000  # options of a piece
_DEEPEST = 12  # parents of a line
_LARGEST = 10**6  # features of a linear

# In the name of an option without a section that is about FP8 or layouts: told where it is not understood.
_PARALLEL = re.compile(r"(?i)degree|parallel|shard|fsdp|fp8|float8")
# Sections of torchtitan that change neither what is computed nor how, and what a case has numbers of its own for.
_NEUTRAL = re.compile(
    r"(?:job|profiling|metrics|checkpoint|comm|memory_estimation|validation|debug|lr_scheduler|optimizer)\."
    r"|training\.(?:steps|dataset)|model\.(?:name|hf_assets_path|tokenizer_path)"
)
_SETTINGS = {"DISABLED": "dis", "AXISWISE": "axs", "TENSORWISE": "ten"}
_DTYPES = {"float8_e4m3fn": "e4m3", "e4m3_dtype": "e4m3", "float8_e5m2": "e5m2", "e5m2_dtype": "e5m2"}
_OWNERS: Mapping[Operand, Operand] = {"i_gw": "i", "w_gi": "w", "go_gw": "go"}  # whose config they have by default


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """A value of a fact, and the words that say so."""

    fact: str
    value: Value
    words: str
    source: Source


class Reading:
    """What the machine-readable parts of a report say. `outside`: what they ask for and no case has, with the words."""

    def __init__(self, report: Report, day: datetime.date) -> None:
        self.statements: list[Statement] = []
        self.outside: dict[str, str] = {}
        self.unknown: dict[str, str] = {}  # by key, the words of an option that was not understood
        self.differ: tuple[str, ...] = ()  # facts that some commands state and others do not
        self._commands: list[set[str]] = []  # the facts of each
        self._day = day
        self._casts: dict[str, object] = {}
        for piece in report.pieces:
            if not piece.comment:  # what somebody else ran
                self._read(piece)
        if self._casts:
            self._operands(self._casts)
        self._one_command()
        self._first_fsdp()
        for feature in self.in_scope:
            self.outside.pop(feature.name, None)
        self._tokens(report.text)

    @property
    def in_scope(self) -> tuple[OutOfScope, ...]:
        """What the reference alone trains, and an option says the size of: experts, pipelines, cp."""
        sizes = [
            (statement.fact, int(str(statement.value))) for statement in self.statements if statement.fact in SIZED
        ]
        return tuple(SIZED[axis] for axis, size in sizes if size >= SIZED[axis].axes[axis])

    def _read(self, piece: Piece) -> None:
        text = re.sub(r"\\\n\s*", " ", piece.text)  # commands of several lines
        if piece.kind != "python":
            self._flags(text)
            self._logged(text)
        if piece.kind == "text":
            for name, value in _VARIABLE.findall(text)[:_MOST]:
                last = value.rpartition("/")[2]
                self._option(name, last, f"{name} {last}", "flag")
                self._refuse(asked_by_option(plain_key(name), value), f"{name} {value}")
            self._settings(text)
        for tree in _trees(piece):
            with contextlib.suppress(RecursionError):  # nested too deeply for anybody's configuration
                self._python(tree)

    def _one_command(self) -> None:
        """What some commands state and others do not is no statement."""
        if self._commands:
            stated = set[str]().union(*self._commands)
            some = {fact for fact in stated if not all(fact in facts for facts in self._commands)}
            self.differ = tuple(sorted(some & {*AXES, "dp", "local_batch"}))
            self.statements = [
                statement for statement in self.statements if statement.source != "flag" or statement.fact not in some
            ]

    def _first_fsdp(self) -> None:
        """What asks for FSDP1: FSDP of accelerate where no version is given, and its class where FSDP2 is not there."""
        second = any(statement.fact == "fsdp" and statement.value for statement in self.statements)
        default = next((statement for statement in self.statements if statement.fact == "accelerate_fsdp"), None)
        if second:
            self.outside.pop(FSDP1.name, None)
        elif default is not None:
            self._refuse(FSDP1, f"{default.words} without fsdp_version: 2")

    def _state(self, fact: str, value: Value, words: str, source: Source) -> None:
        kept = clean_words(value) if isinstance(value, str) else value
        self.statements.append(Statement(fact=fact, value=kept, words=clean_words(words), source=source))

    def _option(self, key: str, value: object, words: str, source: Source) -> bool:
        if str(value) in ("null", "~"):
            return True
        outside = asked_by_option(plain_key(key), value)
        self._refuse(outside, words)
        facts = meaning(key, value, self._day)
        for fact, read in (facts or {}).items():
            self._state(fact, read, words, source)
        return facts is not None or outside is not None

    def _refuse(self, outside: OutOfScope | None, words: str) -> None:
        if outside is not None:
            self.outside.setdefault(outside.name, f"{outside.reason} ({clean_words(words)})")

    # Flags, files and lines

    def _flags(self, text: str) -> None:
        for line in text.split("\n"):
            before = len(self.statements)
            for match in list(_FLAG.finditer(line))[:_MOST]:
                key, value = match[1].rstrip("."), (match[2] or "").strip("\"'")  # a sentence may end behind it
                section, dot, last = key.rpartition(".")
                if last.startswith(("no-", "no_")):
                    key, value = f"{section}{dot}{last[3:]}", "false"
                self._known(key, value or True, match[0].strip(), "flag")
            for key, value in _OVERRIDE.findall(line)[:_MOST] if _LAUNCH.search(line) else ():
                self._option(key, value, f"{key}={value}", "flag")
            facts = {statement.fact for statement in self.statements[before:]}
            if facts and _LAUNCH.search(line):
                self._commands.append(facts)

    def _known(self, key: str, value: object, words: str, source: Source) -> None:
        about = "." in key or _PARALLEL.search(key)
        if not self._option(key, value, words, source) and about and not _NEUTRAL.match(key):
            self.unknown[key] = words

    def _settings(self, text: str) -> None:
        try:
            values = options_of_toml(text)
        except ValueError:
            values = {}
        for key, value in list(values.items())[:_MOST]:
            self._known(key, value, f"{key} = {value}", "config")
        if not values:
            for key, value, line in _lines(text):
                self._option(key, value, line, "config")

    def _logged(self, text: str) -> None:
        for match in _LOGGED.finditer(text):
            for key, value in re.findall(r"(\w+)=([\w.]+)", match[1]):
                self._option(key, value, f"{key}={value}", "config")
        for key, pattern in _TOLD:
            for match in re.finditer(rf"(?m)^\W*(?:rank\d|\[|\d{{4}}-).*{pattern}", text):
                value = match[1] if match.re.groups else True
                self._option(key, value, match[0].rpartition(" - ")[2], "config")
        if "torch._dynamo.exc." in text:  # of what failed while it was compiled
            self._option("torch.compile()", True, "torch._dynamo.exc", "config")
        for names, sizes in _MESH.findall(text):
            for name, size in zip(re.findall(r"\w+", names), re.findall(r"\d+", sizes), strict=False):
                if name in (*MESH_AXES, "dp"):
                    self._state(name, int(size), f"device mesh with [{names}], [{sizes}]", "shape")
        for match in _CASTS.finditer(text):
            logged = dict(part.split(":") for part in match[1].strip(",").split(","))
            own = {name: ("dis",) if cast.startswith("dis") else cast.split("_")[1:] for name, cast in logged.items()}
            self._all_casts({operand: tuple(own.get(operand, ())) for operand in OPERAND_FIELDS}, match[0])

    def _tokens(self, text: str) -> None:
        """[batch, sequence, features] next to [batch * sequence, ...] in one line."""
        for line in text.split("\n")[: 4 * _MOST]:
            shapes = [tuple(map(int, shape_text.split(","))) for shape_text in _SHAPE.findall(line)[:20]]
            for batch, length, *rest in (shape for shape in shapes if len(shape) == 3):
                flat = next((shape for shape in shapes if len(shape) == 2 and shape[0] == batch * length), None)
                if flat is not None:
                    whole = [batch, length, *rest]
                    words = f"shapes {whole} and {list(flat)}: {batch} x {length} = {batch * length}"
                    self._state("local_batch", batch, f"{words}: batch {batch}", "shape")
                    self._state("seq_len", length, f"{words}: sequence {length}", "shape")
                    return

    # Python

    def _python(self, tree: ast.Module) -> None:
        names = dict(_assignments(tree))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        within = {
            word.value: f"{word.arg}." for node in calls for word in node.keywords if isinstance(word.value, ast.Call)
        }
        in_order = sorted(calls, key=lambda call: (call.lineno, call.col_offset))[:_MOST]
        for node in in_order:
            self._call(node, names, within.get(node, ""))
        self._conversion([_dotted(node.func).rpartition(".")[2] for node in in_order])
        for tree_node in ast.walk(tree):
            used = [_dotted(tree_node)] if isinstance(tree_node, ast.Attribute) else []
            if isinstance(tree_node, ast.Import | ast.ImportFrom):
                used = [f"{getattr(tree_node, 'module', None) or ''}.{name.name}" for name in tree_node.names]
            for name in used:
                self._refuse(asked_by_call(name), name.strip("."))
                if name.endswith(".fully_shard"):  # of how many ranks is asked, where the rest of the code is not there
                    self._option("fully_shard()", True, f"import of {name.strip('.')}", "config")

    def _conversion(self, calls: list[str]) -> None:
        """Whether linears are converted after they are parallelized, by the order of the first calls of both."""
        first_calls = [name for name in dict.fromkeys(calls) if name in ("quantize_", "parallelize_module")]
        if len(first_calls) == 2:
            self._state(
                "convert_after_tp", first_calls[1] == "quantize_", f"{first_calls[0]} before {first_calls[1]}", "config"
            )

    def _call(self, node: ast.Call, names: Mapping[str, object], prefix: str) -> None:
        name = _dotted(node.func)
        words = " ".join(ast.unparse(node).split())
        first, arguments = name.rpartition(".")[2], [_value(argument, names) for argument in node.args]
        self._refuse(asked_by_call(name), name)
        known = node.args and (
            isinstance(node.args[0], ast.Constant)
            or getattr(node.args[0], "id", "") in names
            or getattr(node.args[0], "attr", "").isupper()  # a member of an enumeration
        )
        given = arguments[0] if known else True
        for key in (f"{name}()", f"{'.'.join(name.split('.')[-2:])}()", f"{first}()"):
            if self._option(key, given, words[:120], "config"):
                break
        match arguments:
            case [int(inputs), int(outputs), *_] if first == "Linear" and 1 <= min(inputs, outputs) <= _LARGEST:
                if not any(statement.fact == "linear" for statement in self.statements):
                    self._state("linear", f"{inputs}x{outputs}", words, "shape")
        for word in node.keywords:
            value = _value(word.value, names)
            key = f"{prefix}{word.arg}"
            if key.startswith("cast_config_"):
                self._casts[key] = value
            elif word.arg == ROUNDED:
                self._casts[ROUNDED] = value
            elif isinstance(value, bool | int | str | tuple) and (first[:1].isupper() or prefix):
                self._option(key, value, f"{word.arg}={value}", "config")

    def _operands(self, stated: Mapping[str, object]) -> None:
        """The configs of operands of `Float8LinearConfig`."""
        own = {operand: _settings_of(stated, field) for operand, field in OPERAND_FIELDS.items()}
        options = (
            f"{key}={str(value).rpartition('.')[2]}" for key, value in stated.items() if key != ROUNDED and value
        )
        if any(own.values()):
            self._all_casts(own, ", ".join(options), rounded=stated.get(ROUNDED) is True)

    def _all_casts(self, own: Mapping[Operand, tuple[str, ...]], words: str, *, rounded: bool = True) -> None:
        """A cast for every operand; settings that the recipe implies have no spelling in a case."""
        casts = {operand: own[operand] or own[_OWNERS.get(operand, operand)] for operand in own}
        rows = any("axs" in settings for settings in casts.values())
        spelled_casts = [
            f"{operand}:{next((setting for setting in casts[operand] if len(setting) == 3), 'ten')}"
            for operand in casts
        ]
        spelled_casts.append(f"go:{next((setting for setting in casts['go'] if len(setting) == 4), 'e5m2')}")
        self._state("recipe", "rowwise" if rows else "tensorwise", words, "config")
        self._state("casts", tuple(spelled_casts), words, "config")
        if rows and not rounded:
            self._state(ROUNDED, False, words, "config")


def _lines(text: str) -> Iterator[tuple[str, object, str]]:
    """`key = value`, `key: value` and `key .... value`, below `[section]` or an indented parent."""
    section, parents = "", [(-1, "")]
    for line in text.split("\n")[: 4 * _MOST]:
        header, setting = _SECTION.match(line), None if _FLAG.search(line) else _LINE.match(line)
        if header:
            section, parents = f"{header[1]}.", [(-1, "")]
        elif setting:
            indent = len(setting[1])
            while parents[-1][0] >= indent:
                parents.pop()
            key = f"{parents[-1][1]}{setting[2]}"
            if not setting[3] and len(parents) <= _DEEPEST:
                parents.append((indent, f"{key}."))
            elif setting[3]:
                yield f"{section}{key}", setting[3].strip("\"'"), line.strip()


def _trees(piece: Piece) -> Iterator[ast.Module]:
    """The Python code of a piece; of prose, the calls of torchao's float8 API that stand in it."""
    inline = _INLINE.findall(piece.text)[:100] if piece.kind == "prose" else ()
    for text in (piece.text,) if piece.kind == "python" else inline:
        tree = python_tree(text)
        if tree is not None:
            yield tree


def _assignments(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """Names that are given one literal, such as `dim = 1024` or `bs, seq = 32, 512`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        for name, assigned in pairs:
            if isinstance(name, ast.Name) and isinstance(assigned, ast.Constant):
                yield name.id, assigned.value


def _value(node: ast.expr, names: Mapping[str, object]) -> object:
    """A literal, or a name as it is written; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return _dotted(node)
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_value(element, names) for element in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _value(node.left, names), _value(node.right, names)
        return left * right if isinstance(left, int) and isinstance(right, int) and left * right < 10**9 else None
    return None


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id] if isinstance(node, ast.Name) else parts))


def _settings_of(stated: Mapping[str, object], field: str) -> tuple[str, ...]:
    """The settings that a CastConfig of this field has: `axs`, `dis`, a dtype."""
    names = [str(value).rpartition(".")[2] for key, value in stated.items() if key.startswith(f"{field}.")]
    return tuple((_SETTINGS | _DTYPES)[name] for name in names if name in _SETTINGS | _DTYPES)
