"""The case that a report describes, axis by axis, and where each value comes from."""

from __future__ import annotations

import datetime
import re

import msgspec

from harness.bugs.casts import ROUNDED
from harness.bugs.report import clean_words
from harness.bugs.scaling import Sizes, made_smaller
from harness.bugs.statements import Resolved, Statement, shown
from harness.errors import HarnessError
from harness.matrix.axes import axis_values, case_from_axes
from harness.matrix.case import Case, ModelShape
from harness.matrix.layout import DP_AXES, MESH_AXES, OTHERS, REST, left_over, ranks_of
from harness.matrix.linears import BLOCK_LINEARS, OUTPUT_FQN
from harness.matrix.recipes import TRAITS
from harness.matrix.rules import exclusions
from harness.matrix.spellings import NamedFile, on_day, spellings

_PLACEHOLDER = 2  # the degree assumed until somebody answers
_LONGEST = 20  # steps that are run to reach the first bad one
_CONVERTED_OUTPUT = datetime.date(2024, 7, 19)  # until then torchtitan converted the output layer
_FLOAT8_STYLES = datetime.date(2025, 9, 30)  # until then torchtitan used float8 TP styles
_TORCHTITAN = re.compile(
    r"run_(?:llama_)?train\.sh|-m torchtitan|torchtitan/train|Trainer\.Config|--(?:training|parallelism|float8|job)\."
    r"|^[ \t]*\[(?:parallelism|activation_checkpoint)\]",
    re.MULTILINE,
)
_SIZES = (*ModelShape.__struct_fields__, "vocab_size")


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What a draft is made of. `program`: torchtitan, accelerate or "" for any other; `day`: when it was reported."""

    resolved: Resolved
    day: datetime.date
    program: str
    first_bad_step: int | None
    full_size: bool = False


class Draft:
    """The axes of a case while they are found, and the four lists of where they come from."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        self.axes: dict[str, object] = {}
        self.stated: dict[str, str] = {}
        self.derived: dict[str, str] = {}
        self.assumed: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.full_size: dict[str, object] = {}
        self.ignored: list[str] = list(situation.resolved.ignored)
        self._facts = situation.resolved.facts
        self._file = self._named_file()
        self._file_facts = self._file.facts if self._file is not None else {}
        self._layout()
        self._float8()
        self._compile()
        self._checkpointing()
        self._model()
        self._training()
        self._make_smaller()

    def case(self) -> Case:
        """The case. What rules exclude is left out of it and becomes a question."""
        while True:
            case = case_from_axes(self.axes)
            rule = next(iter(exclusions(case)), None)
            if rule is None:
                return case
            given = [name for name in rule.axes if name in self.axes]
            assert given, rule.name
            name = next((each for each in given if each in self.stated), given[0])
            self.missing.setdefault(name, f"{shown(self.axes[name])} is no case: {rule.reason}. What was run?")
            del self.axes[name]

    # What facts are known

    def _fact(self, fact: str, axis: str) -> Statement | None:
        """The statement about a fact; None without one. A contradiction becomes a question about the axis."""
        contradiction = self.situation.resolved.contradictions.get(fact, ())
        if contradiction:
            words = " or ".join(f"{shown(each.value)} ({each.words})" for each in contradiction)
            self.missing[axis] = f"which is it: {words}?"
        return self._facts.get(fact)

    def _put(self, axis: str, value: object, where: dict[str, str], words: str) -> None:
        """Set an axis and record its origin; an earlier derivation is kept in front."""
        self.axes[axis] = value
        where[axis] = f"{where[axis]}; {words}" if where is self.derived and axis in where else words

    def _take(self, fact: str, axis: str | None = None) -> bool:
        """Set an axis to the stated value, else to that of the named file. Returns True if there is one."""
        axis = axis or fact
        found = self._fact(fact, axis)
        if found is not None:
            self.derived.pop(axis, None)
            self._put(axis, found.value, self.derived if found.source == "shape" else self.stated, found.words)
            return True
        if fact in self._file_facts:
            self._put(axis, self._file_facts[fact], self.assumed, self._of_file)
            return True
        return False

    def _named_file(self) -> NamedFile | None:
        """The configuration file that is named, and how to speak of it."""
        name = self._fact("config_file", "config_file")
        if name is None:
            return None
        self._of_file = f"{name.value} of torchtitan in {self.situation.day:%Y-%m}"
        rows = on_day(spellings().file, self.situation.day)
        return next((row for row in rows if re.search(row.pattern, str(name.value), re.IGNORECASE)), None)

    def _default(self, fact: str) -> tuple[object, str] | None:
        """What holds when nothing is said, and why."""
        for row in on_day(spellings().default, self.situation.day):
            if row.fact == fact and row.of in ("", self.situation.program):
                return row.value, row.text
        return None

    @property
    def _configured(self) -> bool:
        """True where options of torchtitan are in the report, so that its defaults hold for the others."""
        given = any(each.source in ("flag", "config") for each in self._facts.values())
        return given and self.situation.program == "torchtitan"

    def _says(self, fact: str) -> bool:
        found = self._facts.get(fact)
        return found is not None and found.value not in (False, "none")

    def _says_word(self, fact: str, word: str) -> bool:
        found = self._facts.get(fact)
        return found is not None and str(found.value) == word

    # Axis by axis

    def _layout(self) -> None:
        if not self._take("tp") and (self._says("tp_used") or self._says("async_tp")):
            self.axes["tp"] = _PLACEHOLDER
            self.missing["tp"] = f"how many TP ranks? {_PLACEHOLDER} until you say"
        for axis in OTHERS:
            self._take(axis)
            self._count(axis)
        self._shards()
        for name in ("sequence_parallel", "loss_parallel", "async_tp"):
            self._take(name)
            if self._count("tp") == 1:
                self._drop(name, "means nothing without TP")

    def _count(self, axis: str) -> int:
        value = self.axes.get(axis, 1)
        count = value if isinstance(value, int) and 1 <= value <= 4096 else 1
        if axis in self.axes:
            self.axes[axis] = count
        return count

    def _shards(self) -> None:
        shard, dp = self._fact(REST, REST), self._fact("dp", REST)
        if shard is not None and shard.value != -1:
            self._take(REST)
        elif dp is not None and isinstance(dp.value, int) and dp.value >= 1:
            replicas = ranks_of(self.axes, set(DP_AXES) - {REST})
            words = f"{dp.words}: {dp.value} data-parallel ranks / {replicas} replicas"
            self._put(REST, max(1, dp.value // replicas), self.derived, words)
        else:
            self._all_other_ranks()
        self._count(REST)

    def _all_other_ranks(self) -> None:
        ranks = self._fact("ranks", REST)
        default = self._default("ranks") if self._file is not None else None
        if ranks is not None and isinstance(ranks.value, int) and ranks.value >= 1:
            words, count, where = ranks.words, ranks.value, self.derived
        elif default is not None:
            words, count, where = default[1], int(str(default[0])), self.assumed
        elif self._says("fsdp") or self._says("fsdp_version") or self._says_word("distributed_type", "FSDP"):
            self.axes[REST] = _PLACEHOLDER
            self.missing[REST] = f"how many FSDP2 ranks? {_PLACEHOLDER} until you say"
            return
        else:
            self.assumed[REST] = "1: nothing says how many ranks share parameters"
            return
        try:
            shards = left_over(count, self.axes, where=words)
        except HarnessError as error:
            self.missing[REST] = f"{words}: {error.what}"
        else:
            self._put(REST, shards, where, f"{words}: {count} ranks / {ranks_of(self.axes, OTHERS)} of other axes")

    def _float8(self) -> None:
        if not self._is_float8():
            return
        if not self._take("recipe"):
            value, why = self._default("recipe") or ("tensorwise", "")
            self._put("recipe", value, self.assumed, why)
        if self.axes["recipe"] not in TRAITS:
            named = shown(self.axes["recipe"])
            self.missing["recipe"] = f"{named} is no recipe here: which is meant? tensorwise until you say"
            self.axes["recipe"] = "tensorwise"
        self._casts()
        sharded = self.axes.get(REST, 1) != 1
        for name in ("fp8_all_gather", "precompute_scale"):
            if self._take(name) and not sharded and not self.situation.resolved.contradictions:
                self._drop(name, "without shards nothing is gathered")
        if not self._take("pad_inner_dim") and (default := self._default("pad_inner_dim")):
            self._put("pad_inner_dim", default[0], self.assumed, default[1])
        self._output_layer()
        self._styles()

    def _casts(self) -> None:
        """Of the configs of operands, what the recipe does not have anyway."""
        found = self._facts.get("casts")
        if found is None or not isinstance(found.value, tuple) or self.axes["recipe"] == "bf16":
            return
        casts = case_from_axes({"recipe": self.axes["recipe"], "casts": found.value}).float8.casts
        if casts:
            self._put("casts", casts, self.stated, found.words)
        if ROUNDED in self._facts:
            self.missing["casts"] = "scales of rows are powers of two here: was round_scales_to_power_of_2 set?"

    def _is_float8(self) -> bool:
        float8, converters = self._facts.get("float8"), self._facts.get("converters")
        if float8 is not None and float8.value is False:
            self._put("recipe", "bf16", self.stated, float8.words)
            return False
        if float8 or "recipe" in self._facts or self._says_word("mixed_precision", "fp8"):
            return True
        if converters and "float8" in shown(converters.value):
            return True
        self._put("recipe", "bf16", self.assumed, "no word of float8 is in the report")
        return False

    def _output_layer(self) -> None:
        filters = self._fact("filter_fqns", "filter_fqns")
        titan = self.situation.program == "torchtitan"
        if filters is not None and isinstance(filters.value, tuple):
            known = [f"layers.0.{name}" for name in BLOCK_LINEARS]
            kept = tuple(each for each in filters.value if any(each in fqn for fqn in known))
            if kept:
                self._put("filter_fqns", kept, self.stated, filters.words)
            if not any(each in OUTPUT_FQN or each in "lm_head" for each in filters.value):
                self._put("output_layer", True, self.derived, f"{filters.words}: the output layer is not filtered")
        elif titan and self.situation.day < _CONVERTED_OUTPUT:
            self._put("output_layer", True, self.assumed, f"torchtitan converted it until {_CONVERTED_OUTPUT}")

    def _styles(self) -> None:
        float8 = self.axes.get("recipe") == "tensorwise" and self._count("tp") > 1
        if self._take("tp_styles") or not float8:
            return
        if self.situation.program == "torchtitan" and self.situation.day < _FLOAT8_STYLES:
            words = f"torchtitan's TP of tensorwise until {_FLOAT8_STYLES}"
            self._put("tp_styles", "float8", self.assumed, words)

    def _compile(self) -> None:
        found = self._fact("compile", "compile")
        components = self._facts.get("compile_components")
        whole = components is None or "model" in shown(components.value)
        if found is not None and found.value is True and whole:
            self._put("compile", "graph", self.stated, found.words)
        elif found is None and self._file_facts.get("compile"):
            self._put("compile", "graph", self.assumed, self._of_file)
        elif self.axes.get("async_tp") and found is None:
            self._put("compile", "graph", self.assumed, "async TP is a pass over compiled blocks")
        elif self.axes.get("async_tp"):
            self._drop("async_tp", "without compiled blocks it is plain TP")
        if "compile" not in self.axes and found is None:
            self.assumed["compile"] = "none: nothing says that blocks were compiled"
        if "compile" in self.axes and self._count("tp") > 1 and self.situation.program == "torchtitan":
            self.assumed["wait_for_embedding"] = "true: a block that gets an unfinished embedding is a bug of its own"

    def _checkpointing(self) -> None:
        prose = self._fact("checkpointing", "checkpointing")
        mode = self._fact("ac_mode", "checkpointing")
        option = self._fact("ac_option", "checkpointing")
        if prose is not None and (mode is None or mode.comment):
            self._put("checkpointing", prose.value, self.stated, prose.words)
            return
        named, words, where = self._mode(mode)
        asked, option_words = self._selective(option)
        full = named if named != "selective" else ("selective_op" if asked == "op" else "selective_layer")
        if not named:
            self.assumed["checkpointing"] = "none: nothing is said of it"
            return
        if full.startswith("selective"):
            words = f"{words}; {option_words}"
            if full == "selective_layer" and asked.isdigit() and int(asked) >= 1:
                self.axes["checkpoint_every"] = int(asked)
        if prose is not None and prose.value != full:
            self.missing["checkpointing"] = f"which is it: {full} ({words}) or {shown(prose.value)} ({prose.words})?"
        self._put("checkpointing", full, where, words)

    def _mode(self, mode: Statement | None) -> tuple[str, str, dict[str, str]]:
        default = self._default("ac_mode") if self._configured else None
        if mode is not None:
            return str(mode.value), mode.words, self.stated
        if "ac_mode" in self._file_facts:
            return str(self._file_facts["ac_mode"]), self._of_file, self.assumed
        return (str(default[0]), default[1], self.assumed) if default else ("", "", self.assumed)

    def _selective(self, option: Statement | None) -> tuple[str, str]:
        if option is not None:
            return str(option.value), option.words
        if "ac_option" in self._file_facts:
            named = str(self._file_facts["ac_option"])
            return named, f"option {named} of {self._of_file}"
        value, why = self._default("ac_option") or ("op", "operators")
        return str(value), f'"{value}": {why}'

    def _model(self) -> None:
        named = self._facts.get("model_size")
        name = str(named.value if named else self._file_facts.get("model_size", ""))
        rows = on_day(spellings().model, self.situation.day)
        row = next((row for row in rows if re.search(row.pattern, name)), None) if name else None
        where = self.derived if named else self.assumed
        if row is not None:
            for axis, size in row.axes.items():
                said = f"{named.words if named else self._of_file}: " if axis == "dim" else ""
                self._put(axis, size, where, f"{said}{row.text}")
        elif name:
            self.derived["model"] = f"{clean_words(name)} becomes a small Llama: its linears are judged, not its layers"
        for axis in _SIZES:
            self._take(axis)
        self._linears()
        if not any(axis in self.axes for axis in _SIZES):
            self.assumed["model"] = "tiny: no size is in the report"

    def _linears(self) -> None:
        """Sizes of a bare stack of linears; heads that divide its dim."""
        features = self._facts.get("linear")
        if features is not None and "dim" not in self.axes:
            inputs, outputs = map(int, str(features.value).split("x"))
            words = f"{features.words}: linears of {inputs} and {outputs} features, in a Llama"
            self._put("dim", inputs, self.derived, words)
            self._put("ffn_dim", outputs, self.derived, words)
        dim, tp = int(str(self.axes.get("dim", 128))), self._count("tp")
        heads = int(str(self.axes.get("heads", 8)))
        if "heads" in self.axes:
            self.axes.setdefault("kv_heads", heads)
        if dim % heads or dim // heads % 2 or heads % tp:
            fitting = [each for each in range(tp, dim // 2 + 1, tp) if dim % each == 0 and dim // each % 2 == 0]
            if fitting:
                least = min(fitting)
                for axis in ("heads", "kv_heads"):
                    self._put(axis, least, self.assumed, f"{least} heads of {dim // least} features")
            elif "dim" in self.axes:
                self.missing["dim"] = f"{dim} does not split into heads for {tp} TP ranks: which size has the model?"
                del self.axes["dim"]

    def _training(self) -> None:
        if not self._take("dtype"):
            default = self._default("dtype") if self._configured else None
            self._put("dtype", "bfloat16", self.assumed, default[1] if default else "what users run")
        emulated = self._facts.get("emulate")
        if emulated is not None and emulated.value:
            self.ignored.append(f"{emulated.words}: FP8 is never emulated")
        if self._take("parameter_dtype") and self.axes["dtype"] != "bfloat16":
            self._drop("parameter_dtype", "parameters in bfloat16 are those of runs in bfloat16")
        if self._take("reduce_dtype") and self._count(REST) == 1:
            self._drop("reduce_dtype", "without shards no gradient is reduced")
        self._take("seq_len")
        if norm := self._facts.get("max_norm"):
            self.ignored.append(f"{norm.words}: clipping is compared in float64 alone: set dtype and max_norm for it")
        dp = ranks_of(self.axes, DP_AXES)
        if self._take("local_batch"):
            local = self._local_batch()
            self._put("global_batch", local * dp, self.derived, f"{local} sequences x {dp} data-parallel ranks")
        else:
            words = "2 sequences a data-parallel rank: no batch is in the report"
            self._put("global_batch", 2 * dp, self.assumed, words)
        self._accumulation(dp)
        step = self.situation.first_bad_step
        if step is not None and (step <= _LONGEST or self.situation.full_size):
            self._put("steps", max(5, step), self.derived, f"the first bad step is {step}")
        elif step is not None:
            self.assumed["steps"] = f"5; the first bad step is {step}: set steps to reach it"

    def _accumulation(self, dp: int) -> None:
        """As many microbatches as are stated, of one sequence at least."""
        if not self._take("accumulation"):
            return
        count = self._count("accumulation")
        if self.axes.get("compile", "none") != "none":
            self._drop("accumulation", "compiled blocks train whole batches")
        elif self._count("global_batch") % (dp * count):
            words = f"a sequence for each of {count} microbatches on {dp} data-parallel ranks"
            self._put("global_batch", dp * count, self.derived, words)

    def _local_batch(self) -> int:
        """Sequences of a rank, which is no axis: its words explain that of all ranks."""
        local = max(1, int(str(self.axes.pop("local_batch"))))
        for table in (self.stated, self.derived, self.assumed):
            if "local_batch" in table:
                table["global_batch"] = table.pop("local_batch")
        return local

    def _drop(self, axis: str, why: str) -> None:
        if axis in self.axes:
            words = self.stated.pop(axis, "") or self.assumed.pop(axis, "")
            self.ignored.append(f"{axis} = {shown(self.axes.pop(axis))}: {words}: {why}")

    def _make_smaller(self) -> None:
        if self.situation.full_size:
            return
        try:
            values = axis_values(case_from_axes({**self.axes, "filter_fqns": ()}))
        except (ValueError, TypeError):
            return
        wraps = values["checkpointing"] == "selective_layer"
        sizes = Sizes(
            **{name: int(str(values[name])) for name in (*_SIZES, "seq_len", *MESH_AXES)},
            local_batch=max(1, int(str(values["global_batch"])) // ranks_of(values, DP_AXES)),
            every=int(str(values["checkpoint_every"])) if wraps else 1,
        )
        small, arithmetic = made_smaller(sizes)
        for axis, words in arithmetic.items():
            if axis != "local_batch":
                self.full_size[axis] = getattr(sizes, axis)
                self._put(axis, getattr(small, axis), self.derived, words)
        batch = small.local_batch * small.dp
        if batch != values["global_batch"]:
            if "global_batch" in self.derived:
                before = self.full_size["global_batch"] = values["global_batch"]
                words = f"{before} made smaller: {small.local_batch} sequences x {small.dp} data-parallel ranks"
                self._put("global_batch", batch, self.derived, words)
            self.axes["global_batch"] = batch


def program_of(text: str, bug_id: str) -> str:
    """Whose configuration a report has: torchtitan, accelerate, or "" for any other."""
    if bug_id.startswith("torchtitan-") or _TORCHTITAN.search(text):
        return "torchtitan"
    return "accelerate" if re.search(r"fp8_config:|accelerate launch", text) else ""
