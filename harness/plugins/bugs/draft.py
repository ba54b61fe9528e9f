"""The case that a configuration describes, axis by axis, and where each value comes from."""

from collections.abc import Callable, Sequence

import msgspec

from harness.errors import HarnessError
from harness.matrix.axes import case_from_axes, checked_value
from harness.matrix.case import Case, ModelShape
from harness.matrix.layout import DP_AXES, OTHERS, REST, left_over, ranks_of
from harness.matrix.linears import BLOCK_LINEARS, OUTPUT_FQN
from harness.matrix.recipes import TRAITS, mx_recipe
from harness.matrix.rules import exclusions
from harness.plugins.bugs.reading import ROUNDED, Resolved, Statement
from harness.plugins.bugs.report import clean_words
from harness.plugins.bugs.spellings import (
    CONVERTED_OUTPUT,
    FILTERS,
    FLOAT8_STYLES,
    Era,
    default_of,
    facts_of_file,
    shown,
    sizes_of_model,
)
from harness.registry import REFERENCE, is_llama

_PLACEHOLDER = 2  # the degree assumed until somebody answers
_LARGEST = 4096  # degree
TORCHTITAN = "torchtitan"  # the tool
SIZES = (*ModelShape.__struct_fields__, "vocab_size")
# What means nothing where a degree is 1, or there are no compiled blocks, and why.
_MEANINGLESS = {
    **dict.fromkeys(("sequence_parallel", "loss_parallel", "async_tp"), ("tp", "means nothing without TP")),
    **dict.fromkeys(("fp8_all_gather", "precompute_scale"), (REST, "without shards nothing is gathered")),
    "reshard_after_forward": (REST, "without shards nothing is gathered"),
    "reduce_dtype": (REST, "without shards no gradient is reduced"),
}
# The axis that a question about a fact is asked of.
_ASKED_AS = {
    **dict.fromkeys(("dp", "ranks", "ranks_per_node", "nodes", "fsdp", "zero"), REST),
    **dict.fromkeys(("local_batch", "local_tokens"), "global_batch"),
    **dict.fromkeys(("float8", "mxfp8", "converters"), "recipe"),
    "compile_components": "compile",
    "ac_option": "checkpointing",
}
# Facts of which a contradiction changes no case.
_IDLE = frozenset({"train_steps", "learning_rate", "max_norm", "emulate", "config_file", "model_name", "linear"})


class Draft:
    """The axes of a case while they are found, and the four lists of where they come from.

    `tool`: whose configuration it is, such as torchtitan, "" for any other; `target`: what trains the case.
    """

    def __init__(self, resolved: Resolved, *, era: Era, tool: str, target: str = REFERENCE) -> None:
        self._facts, self._contradictions = resolved.facts, resolved.contradictions
        self._era, self._day, self.tool, self._target = era, era.day, tool, target
        self.axes: dict[str, object] = {} if target == REFERENCE else {"target": target}
        self.stated, self.derived, self.assumed, self.missing = (dict[str, str]() for _ in range(4))
        self.full_size: dict[str, object] = {}
        self.ignored: list[str] = list(resolved.ignored)
        named = self.fact("config_file")
        self.of_file = f"{named.value} of torchtitan in {era.day:%Y-%m}" if named else ""
        self.file = facts_of_file(str(named.value), era.day) if named else {}
        self._configured = bool(self._facts) and tool == TORCHTITAN  # its defaults hold for what is not stated
        for find in (self._layout, self._float8, self._compile, self._checkpointing, self._model, self._precision):
            find()
        for axis, (other, why) in _MEANINGLESS.items():
            if self.axes.get(other, 1) == 1 and other not in self._contradictions:
                self.drop(axis, why)
        for fact in self._contradictions:
            if fact not in _IDLE:
                self.fact(fact)

    def case(self) -> Case:
        """Return the case. What rules exclude is left out of it and becomes a question."""
        while True:
            case = case_from_axes(self.axes)
            rule = next(iter(exclusions(case)), None)
            if rule is None:
                return case
            given = [name for name in rule.axes if name in self.axes]
            assert given, rule.name
            name = next((axis for axis in given if axis in self.stated), given[0])
            self.missing.setdefault(name, f"{shown(self.axes[name])} is no case: {rule.reason}. What was run?")
            del self.axes[name]

    # What facts are known

    def fact(self, fact: str) -> Statement | None:
        """Return the statement about a fact; None without one. A contradiction becomes a question about its axis."""
        contradiction = self._contradictions.get(fact, ())
        if contradiction:
            words = " or ".join(f"{shown(statement.value)} ({statement.words})" for statement in contradiction)
            self.missing[_ASKED_AS.get(fact, fact)] = f"which is it: {words}?"
        return self._facts.get(fact)

    def says(self, fact: str) -> bool:
        statement = self._facts.get(fact)
        return statement is not None and statement.value not in (False, "none")

    def words_of(self, fact: str) -> str:
        """Return the words that state a fact; "" where nothing does."""
        return self._facts[fact].words if fact in self._facts else ""

    def value_of(self, fact: str) -> object:
        """Return the value of a fact; "" where nothing states it."""
        return self._facts[fact].value if fact in self._facts else ""

    def put(self, axis: str, value: object, where: dict[str, str], words: str) -> None:
        """Set an axis and record its origin; an earlier derivation is kept in front."""
        self.axes[axis] = value
        where[axis] = f"{where[axis]}; {words}" if where is self.derived and axis in where else words

    def ask(self, axis: str, value: object, question: str) -> None:
        """Take a value until somebody answers."""
        self.axes[axis] = value
        self.missing.setdefault(axis, f"{question} {shown(value)} until you say")

    def take(self, axis: str) -> bool:
        """Set an axis to the stated value, else to the named file's. Returns True if there is one."""
        statement = self.fact(axis)
        try:
            if statement is not None:
                self.derived.pop(axis, None)
                self.put(axis, checked_value(axis, statement.value), self.stated, statement.words)
            elif axis in self.file:
                self.put(axis, self.file[axis], self.assumed, self.of_file)
        except HarnessError as error:
            self.missing[axis] = f"{statement.words if statement else ''}: {error.what} What was run?"
        return axis in self.axes

    def default(self, fact: str) -> tuple[object, str] | None:
        return default_of(fact, self.tool, self._day)

    def count(self, axis: str) -> int:
        return int(str(self.axes.get(axis, 1)))

    def drop(self, axis: str, why: str) -> None:
        if axis in self.axes:
            words = self.stated.pop(axis, "") or self.assumed.pop(axis, "")
            self.ignored.append(f"{axis} = {shown(self.axes.pop(axis))}: {words}: {why}")

    # Axis by axis

    def _layout(self) -> None:
        for axis in OTHERS:
            self.take(axis)
        if "tp" not in self.axes and (self.says("tp_used") or self.says("async_tp")):
            self.ask("tp", _PLACEHOLDER, "how many TP ranks?")
        if "pp" not in self.axes and self.says("pp_used"):
            self.ask("pp", _PLACEHOLDER, "how many stages has the pipeline?")
        if self.says("cp_used") and "cp" not in self._facts:
            self.ask("cp", _PLACEHOLDER, "how many ranks share a sequence?")
        self._shards()
        for axis in ("sequence_parallel", "loss_parallel", "async_tp", "reshard_after_forward"):
            own_plan = self.says("tp_used")  # whose styles say it, or code that is not there
            if not self.take(axis) and self.count("tp") > 1 and not own_plan and (default := self.default(axis)):
                self.put(axis, default[0], self.assumed, default[1])

    def _shards(self) -> None:
        shard, dp = self.fact(REST), self.fact("dp")
        if shard is not None and shard.value != -1:
            self.take(REST)
        elif dp is not None and isinstance(dp.value, int) and 1 <= dp.value <= _LARGEST:
            replicas = ranks_of(self.axes, set(DP_AXES) - {REST})
            words = f"{dp.words}: {dp.value} data-parallel ranks / {replicas} replicas"
            self.put(REST, max(1, dp.value // replicas), self.derived, words)
        else:
            self._all_other_ranks(rest_is_stated=shard is not None)
        if self.says("zero"):
            self.assumed["ZeRO"] = f"FSDP2 stands for stage 3 ({self._facts['zero'].words})"

    def _ranks(self) -> Statement | None:
        """Return how many ranks the job has, by their number or by those of a node."""
        ranks, node, nodes = self.fact("ranks"), self.fact("ranks_per_node"), self.fact("nodes")
        if ranks is not None or node is None:
            return ranks
        count = int(str(node.value)) * int(str(nodes.value if nodes else 1))
        words = f"{node.words}, {nodes.words}" if nodes else node.words
        return msgspec.structs.replace(node, value=count, words=words)

    def _all_other_ranks(self, *, rest_is_stated: bool) -> None:
        ranks = self._ranks()
        by_command = "config_file" in self._facts and self._facts["config_file"].source == "flag"
        default = self.default("ranks") if self.file and by_command else None
        sharded = any(map(self.says, ("fsdp", "unversioned_fsdp", "zero", "cp", "ep")))
        if ranks is not None and isinstance(ranks.value, int) and 1 <= ranks.value <= _LARGEST:
            words, count, where = ranks.words, ranks.value, self.derived
        elif default is not None and not rest_is_stated:
            words, count, where = default[1], int(str(default[0])), self.assumed
        elif sharded or rest_is_stated or self._configured:
            experts = int(str(self._facts["ep"].value)) if "ep" in self._facts else 1
            placeholder = max(_PLACEHOLDER, min(8, experts) // self.count("tp"))
            self.ask(REST, placeholder, "how many FSDP2 ranks?")
            return
        else:
            self.assumed[REST] = "1: nothing says how many ranks share parameters"
            return
        sharing = int(str(self._facts["cp"].value)) if "cp" in self._facts else 1
        others = {**self.axes, "pp": self.count("pp") * sharing}  # ranks of cp are counted when it is added
        try:
            shards = left_over(count, others, where=words)
        except HarnessError as error:
            self.missing[REST] = f"{words}: {error.what}"
        else:
            stands = "; FSDP2 stands for its data parallelism" if self.tool == "megatron" and shards > 1 else ""
            rest = ranks_of(others, OTHERS)
            self.put(REST, shards, where, f"{words}: {count} ranks / {rest} of other axes{stands}")

    def _float8(self) -> None:
        """The recipe by the first of these rules that holds, then its options."""
        facts, words, converters = self._facts, self.words_of, shown(self.value_of("converters"))
        off = self.value_of("float8") is False and "float8" not in self._contradictions
        gathers = next((fact for fact in ("fp8_all_gather", "precompute_scale") if self.says(fact)), "")
        question = f"{shown(self.value_of('recipe'))} is no recipe here: which is meant?"
        only = f"{words(gathers)}: the only recipe that gathers in float8"
        is_unknown = "recipe" in facts and facts["recipe"].value not in TRAITS
        is_unread = self.tool == TORCHTITAN and not self.file and str(self.value_of("config_file")).isidentifier()
        which = f"what {words('config_file')} sets is not known here: which recipe?"
        is_mx = ".mx" in converters or converters == "mx"
        rules: Sequence[tuple[bool, Callable[[], object]]] = (
            (off, lambda: self.put("recipe", "bf16", self.stated, words("float8"))),
            ("mxfp8" in facts and "recipe" not in facts, lambda: self._mxfp8(facts["mxfp8"])),
            (is_unknown, lambda: self.ask("recipe", "tensorwise", question)),
            ("recipe" in facts or "recipe" in self.file, lambda: self.take("recipe")),
            (is_mx, lambda: self.put("recipe", "mxfp8", self.derived, words("converters"))),
            (gathers != "", lambda: self.put("recipe", "tensorwise", self.derived, only)),
            ("float8" in facts or "float8" in self.file or "float8" in converters, self._unnamed_recipe),
            (is_unread, lambda: self.ask("recipe", "bf16", which)),
            (True, lambda: self.put("recipe", "bf16", self.assumed, "nothing in it asks for FP8")),
        )
        next(state for holds, state in rules if holds)()
        if self.axes["recipe"] != "bf16":
            self._float8_options()

    def _unnamed_recipe(self) -> None:
        value, why = self.default("recipe") or ("tensorwise", "")
        if self.tool == TORCHTITAN and not self._era.sure:
            question = "without a name, torchtitan means tensorwise before 0.3 and rowwise since: which was run?"
            self.ask("recipe", "tensorwise", question)
        else:
            self.put("recipe", value, self.assumed, f"{why} ({self._era.source})" if self.tool == TORCHTITAN else why)

    def _float8_options(self) -> None:
        self._casts()
        self.take("fp8_all_gather")
        self.take("precompute_scale")
        if not self.take("pad_inner_dim") and self.says("pads") and (default := self.default("pad_inner_dim")):
            self.put("pad_inner_dim", default[0], self.assumed, default[1])
        self._output_layer()
        styles = self.axes["recipe"] == "tensorwise" and self.count("tp") > 1
        if not self.take("tp_styles") and styles and self.tool == TORCHTITAN and self._day < FLOAT8_STYLES:
            self.put("tp_styles", "float8", self.assumed, f"torchtitan's TP of tensorwise until {FLOAT8_STYLES}")
        elif styles and self.tool == "torchtune":
            self.put("tp_styles", "float8", self.assumed, "torchtune's TP of tensorwise")

    def _mxfp8(self, block: Statement) -> None:
        """MXFP8, whose way of conversion `block` states."""
        mode, high = self._facts.get("scale_calculation_mode"), self._facts.get("wgrad_with_hp")
        conversion, _, rest = str(block.value).partition("_")
        floor = mode is not None and "floor" in str(mode.value).lower()
        in_high = bool(rest) or (high is not None and high.value is True)
        recipe = mx_recipe(rounds_scales_down=floor, wgrad=not in_high)
        words = "; ".join(dict.fromkeys(statement.words for statement in (block, mode, high) if statement is not None))
        self.put("recipe", recipe or mx_recipe(rounds_scales_down=floor, wgrad=True), self.stated, words)
        if recipe is None:
            self.missing["recipe"] = "no case has FLOOR with weight gradients in high precision: which of both was run?"
        if conversion != "module":
            self.put("conversion", conversion, self.stated, block.words)
        if self.count("tp") > 1:
            self.take("convert_after_tp")

    def _casts(self) -> None:
        statement = self._facts.get("casts")
        if statement is None:
            return
        casts = case_from_axes({"recipe": self.axes["recipe"], "casts": statement.value}).float8.casts
        if casts:
            self.put("casts", casts, self.stated, statement.words)
        if ROUNDED in self._facts:
            self.missing["casts"] = "scales of rows are powers of two here: was round_scales_to_power_of_2 set?"

    def _output_layer(self) -> None:
        filters = self.fact("filter_fqns")
        # torchtitan does not convert the output layer to MXFP8, nor does a recipe that the user chose now.
        chosen_here = str(self.axes["recipe"]).startswith("mxfp8") or self.words_of("recipe") == "--recipe"
        if filters is not None and isinstance(filters.value, tuple):
            known = [*(f"layers.0.{name}" for name in BLOCK_LINEARS), OUTPUT_FQN, "lm_head"]
            output = [filter_fqn for filter_fqn in filters.value if filter_fqn in OUTPUT_FQN or filter_fqn in "lm_head"]
            kept = tuple(filter_fqn for filter_fqn in filters.value if any(filter_fqn in fqn for fqn in known[:-2]))
            lost = [filter_fqn for filter_fqn in filters.value if not any(filter_fqn in fqn for fqn in known)]
            self.ignored += [f"filter_fqns {clean_words(fqn)}: matches no linear of the Llama" for fqn in lost]
            if kept:
                self.put("filter_fqns", kept, self.stated, filters.words)
            if not output:
                self.put("output_layer", True, self.derived, f"{filters.words}: the output layer is not filtered")
        elif self.tool == TORCHTITAN and self._day < CONVERTED_OUTPUT:
            self.put("output_layer", True, self.assumed, f"torchtitan converted it until {CONVERTED_OUTPUT}")
        elif self.tool == TORCHTITAN and self._day >= FILTERS and not (self.file or chosen_here):
            self.put("output_layer", True, self.assumed, "torchtitan converts it where no filter names it")

    def _compile(self) -> None:
        components = self._facts.get("compile_components")
        statement = self.fact("compile")
        if components is not None and "model" not in shown(components.value):
            self.ignored.append(f"{components.words}: blocks are not compiled")
        elif self.take("compile") and self.axes["compile"] == "none":
            del self.axes["compile"]
        if "compile" not in self.axes and self.axes.get("async_tp"):
            if statement is None:
                self.put("compile", "graph", self.assumed, "async TP is a pass over compiled blocks")
            else:
                self.drop("async_tp", "without compiled blocks it is plain TP")
        elif "compile" not in self.axes and statement is None:
            self.assumed["compile"] = "none: nothing says that blocks were compiled"
        if "compile" in self.axes and self.count("tp") > 1 and self.tool == TORCHTITAN:
            if is_llama(self._target):
                self.assumed["wait_for_embedding"] = "true: blocks that get an unfinished embedding are another bug"
            else:
                self.put("wait_for_embedding", False, self.assumed, "torchtitan hands blocks an unfinished embedding")

    def _checkpointing(self) -> None:
        mode = self.fact("checkpointing")
        default = self.default("checkpointing") if self._configured else None
        if mode is not None:
            named, words, where = str(mode.value), mode.words, self.stated
        elif "checkpointing" in self.file:
            named, words, where = str(self.file["checkpointing"]), self.of_file, self.assumed
        elif default is not None:
            named, words, where = str(default[0]), default[1], self.assumed
        else:
            self.assumed["checkpointing"] = "none: nothing asks for it"
            return
        if named == "selective":
            asked, option = self._selective()
            words = f"{words}; {option}"
            named = "selective_op" if asked == "op" else "selective_layer"
            if named == "selective_layer" and asked.isdigit() and int(asked) >= 1:
                self.axes["checkpoint_every"] = int(asked)
        self.put("checkpointing", named, where, words)

    def _selective(self) -> tuple[str, str]:
        option = self.fact("ac_option")
        if option is not None:
            return str(option.value), option.words
        if "ac_option" in self.file:
            return str(self.file["ac_option"]), f"option {self.file['ac_option']} of {self.of_file}"
        value, why = self.default("ac_option") or ("op", "operators")
        return str(value), f'"{value}": {why}'

    def _model(self) -> None:
        named = self._facts.get("model_size")
        other = self._facts.get("model_name")
        size = self.file.get("model_size") or (other.value if other else "")
        name = str(named.value if named else size)
        is_llama = other is None or "llama" in str(other.value).lower()
        known = sizes_of_model(name, self._day) if is_llama else None
        where, words = (self.derived, named.words) if named else (self.assumed, self.of_file)
        if known is not None:
            for axis, size in known[1].items():
                self.put(axis, size, where, f"{words}: {known[0]}" if axis == "dim" else known[0])
        elif name and name != "llama3":
            self.derived["model"] = (
                f"{clean_words(name)} becomes a small Llama: its linears are checked, not its layers"
            )
        for axis in (*SIZES, "pad_vocab_to_multiple_of", "tied", "bias"):
            self.take(axis)
        self._linears()
        if not any(axis in self.axes for axis in SIZES) and "model" not in self.derived:
            self.assumed["model"] = "tiny: it states no size"

    def _linears(self) -> None:
        """Sizes of a bare stack of linears; heads that divide its dim."""
        features = self._facts.get("linear")
        if features is not None and "dim" not in self.axes:
            words = f"{features.words}: linears of {str(features.value).replace('x', ' and ')} features, in a Llama"
            for axis, size in zip(("dim", "ffn_dim"), str(features.value).split("x"), strict=True):
                self.put(axis, int(size), self.derived, words)
        dim, tp = int(str(self.axes.get("dim", 128))), self.count("tp")
        heads = int(str(self.axes.get("heads", 8)))
        if "heads" in self.axes:
            self.axes.setdefault("kv_heads", heads)
        if dim % heads or dim // heads % 2 or heads % tp:
            fitting = [count for count in range(tp, dim // 2 + 1, tp) if dim % count == 0 and dim // count % 2 == 0]
            if fitting:
                if "heads" in self.stated:
                    question = f"{heads} heads do not fit {dim} features and {tp} TP ranks: how many were run?"
                    self.missing["heads"] = f"{question} {fitting[0]} until you say"
                for axis in ("heads", "kv_heads"):
                    self.put(axis, fitting[0], self.assumed, f"{fitting[0]} heads of {dim // fitting[0]} features")
            elif "dim" in self.axes:
                self.missing["dim"] = f"{dim} does not split into heads for {tp} TP ranks: which size has the model?"
                del self.axes["dim"]

    def _precision(self) -> None:
        if not self.take("dtype"):
            self.put("dtype", "bfloat16", self.assumed, "what users run, and torchtitan by default")
        emulated, norm = self._facts.get("emulate"), self._facts.get("max_norm")
        if emulated is not None and emulated.value:
            self.ignored.append(f"{emulated.words}: FP8 is never emulated")
        if norm is not None:
            self.ignored.append(f"{norm.words}: clipping is compared in float64 alone: set dtype and max_norm for it")
        if self.take("parameter_dtype") and self.axes["dtype"] != "bfloat16":
            self.drop("parameter_dtype", "parameters in bfloat16 need dtype = bfloat16")
        elif self._target != REFERENCE:
            self.drop("parameter_dtype", "a run of torchtitan with it was not measured")
        self.take("reduce_dtype")
