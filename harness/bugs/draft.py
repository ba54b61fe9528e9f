"""The case that a report or a configuration describes, axis by axis, and where each value comes from."""

from __future__ import annotations

import datetime

import msgspec

from harness.bugs.facts import (
    CONVERTED_OUTPUT,
    FLOAT8_STYLES,
    LAST_TOML,
    Resolved,
    default_of,
    facts_of_file,
    shown,
    sizes_of_model,
)
from harness.bugs.reading import ROUNDED, Statement
from harness.bugs.report import clean_words
from harness.bugs.scaling import Sizes, made_smaller
from harness.errors import HarnessError
from harness.matrix.axes import AXES, axis_values, case_from_axes, checked_value
from harness.matrix.case import MODEL_PRESETS, Case, ModelShape
from harness.matrix.layout import DP_AXES, MESH_AXES, OTHERS, REST, Layout, left_over, ranks_of
from harness.matrix.linears import BLOCK_LINEARS, OUTPUT_FQN
from harness.matrix.recipes import TRAITS, block_recipe
from harness.matrix.rules import exclusions
from harness.matrix.stages import stage_count
from harness.matrix.targets import REFERENCE

_PLACEHOLDER = 2  # the degree assumed until somebody answers
_LARGEST = 4096  # degree
_FEW_EXPERTS = 8  # more of them show no other faults
_FEW_RANKS = 4  # that share sequences: the least with which the order of more than two shows
_PIECE = 16  # positions of a rank of these: what every recipe can multiply
_LONGEST = 20  # steps that are run to reach the first bad one
_SIZES = (*ModelShape.__struct_fields__, "vocab_size")
# What means nothing where a degree is 1, or there are no compiled blocks, and why.
_MEANINGLESS = {
    **dict.fromkeys(("sequence_parallel", "loss_parallel", "async_tp"), ("tp", "means nothing without TP")),
    **dict.fromkeys(("fp8_all_gather", "precompute_scale"), (REST, "without shards nothing is gathered")),
    "reshard_after_forward": (REST, "without shards nothing is gathered"),
    "reduce_dtype": (REST, "without shards no gradient is reduced"),
}


class Draft:
    """The axes of a case while they are found, and the four lists of where they come from.

    `program`: torchtitan, accelerate or "" for any other; `day`: when it was reported; `target`: what trains the case;
    `first_bad_step`: that the case must reach.
    """

    def __init__(
        self,
        resolved: Resolved,
        *,
        day: datetime.date,
        program: str,
        target: str = REFERENCE,
        first_bad_step: int | None = None,
        full_size: bool = False,
    ) -> None:
        self._facts, self._contradictions = resolved.facts, resolved.contradictions
        self._day, self._program, self._target = day, program, target
        self._first_bad_step, self._as_reported = first_bad_step, full_size
        self.axes: dict[str, object] = {} if target == REFERENCE else {"target": target}
        self.stated: dict[str, str] = {}
        self.derived: dict[str, str] = {}
        self.assumed: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.asked: set[str] = set()  # of `missing`, what has a value until somebody answers
        self.full_size: dict[str, object] = {}
        self.ignored: list[str] = list(resolved.ignored)
        named = self._fact("config_file")
        self._of_file = f"{named.value} of torchtitan in {day:%Y-%m}" if named else ""
        self._file = facts_of_file(str(named.value), day) if named else {}
        # True where options of torchtitan are given, so that its defaults hold for the others.
        options = any(statement.source in ("flag", "config") for statement in self._facts.values())
        self._configured = options and program == "torchtitan"
        for find in (self._layout, self._float8, self._compile, self._checkpointing, self._model, self._training):
            find()
        for axis, (other, why) in _MEANINGLESS.items():
            if self.axes.get(other, 1) == 1 and other not in self._contradictions:
                self._drop(axis, why)
        self._make_smaller()
        self._pipeline()
        self._experts()
        self._context()

    def case(self) -> Case:
        """The case. What rules exclude is left out of it and becomes a question."""
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

    def _fact(self, fact: str, axis: str = "") -> Statement | None:
        """The statement about a fact; None without one. A contradiction becomes a question about the axis."""
        contradiction = self._contradictions.get(fact, ())
        if contradiction:
            words = " or ".join(f"{shown(statement.value)} ({statement.words})" for statement in contradiction)
            self.missing[axis or fact] = f"which is it: {words}?"
        return self._facts.get(fact)

    def _says(self, fact: str) -> bool:
        statement = self._facts.get(fact)
        return statement is not None and statement.value not in (False, "none")

    def _put(self, axis: str, value: object, where: dict[str, str], words: str) -> None:
        """Set an axis and record its origin; an earlier derivation is kept in front."""
        self.axes[axis] = value
        where[axis] = f"{where[axis]}; {words}" if where is self.derived and axis in where else words

    def _ask(self, axis: str, value: object, question: str) -> None:
        self.axes[axis] = value
        self.asked.add(axis)
        self.missing.setdefault(axis, f"{question} {value} until you say")

    def _take(self, axis: str) -> bool:
        """Set an axis to the stated value, else to the named file's. Returns True if there is one."""
        statement = self._fact(axis)
        try:
            if statement is not None:
                self.derived.pop(axis, None)
                where = self.derived if statement.source == "shape" else self.stated
                self._put(axis, checked_value(axis, statement.value), where, statement.words)
            elif axis in self._file:
                self._put(axis, self._file[axis], self.assumed, self._of_file)
        except HarnessError as error:
            self.missing[axis] = f"{statement.words if statement else ''}: {error.what} What was run?"
        return axis in self.axes

    def _default(self, fact: str) -> tuple[object, str] | None:
        return default_of(fact, self._program, self._day)

    def _count(self, axis: str) -> int:
        return int(str(self.axes.get(axis, 1)))

    def _drop(self, axis: str, why: str) -> None:
        if axis in self.axes:
            words = self.stated.pop(axis, "") or self.assumed.pop(axis, "")
            self.ignored.append(f"{axis} = {shown(self.axes.pop(axis))}: {words}: {why}")

    # Axis by axis

    def _layout(self) -> None:
        for axis in OTHERS:
            self._take(axis)
        if "tp" not in self.axes and (self._says("tp_used") or self._says("async_tp")):
            self._ask("tp", _PLACEHOLDER, "how many TP ranks?")
        if "dp_replicate" not in self.axes and self._says("hsdp") and not (self._file or self._configured):
            self._ask("dp_replicate", _PLACEHOLDER, "how many replicas?")
        self._shards()
        for axis in ("sequence_parallel", "loss_parallel", "async_tp", "reshard_after_forward"):
            self._take(axis)

    def _shards(self) -> None:
        shard, dp = self._fact(REST), self._fact("dp", REST)
        if shard is not None and shard.value != -1:
            self._take(REST)
        elif dp is not None and isinstance(dp.value, int) and 1 <= dp.value <= _LARGEST:
            replicas = ranks_of(self.axes, set(DP_AXES) - {REST})
            words = f"{dp.words}: {dp.value} data-parallel ranks / {replicas} replicas"
            self._put(REST, max(1, dp.value // replicas), self.derived, words)
        else:
            self._all_other_ranks()

    def _all_other_ranks(self) -> None:
        ranks = self._fact("ranks", REST)
        default = self._default("ranks") if self._file else None
        if ranks is not None and isinstance(ranks.value, int) and 1 <= ranks.value <= _LARGEST:
            words, count, where = ranks.words, ranks.value, self.derived
        elif default is not None:
            words, count, where = default[1], int(str(default[0])), self.assumed
        elif self._says("fsdp") or self._says("accelerate_fsdp") or self._configured:
            self._ask(REST, _PLACEHOLDER, "how many FSDP2 ranks?")
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
        float8, converters = self._facts.get("float8"), self._facts.get("converters")
        named, block = self._facts.get("recipe"), self._facts.get("mxfp8")
        if block is not None and (named is None or named.source in ("title", "prose")):
            self._mxfp8(block)
        elif float8 is not None and float8.value is False:
            self._put("recipe", "bf16", self.stated, float8.words)
        elif not (float8 or named or "float8" in self._file or (converters and "float8" in shown(converters.value))):
            self._put("recipe", "bf16", self.assumed, "no word of float8 is in the report")
        elif named is not None and named.value not in TRAITS:
            self._ask("recipe", "tensorwise", f"{shown(named.value)} is no recipe here: which is meant?")
        elif not self._take("recipe"):
            value, why = self._default("recipe") or ("tensorwise", "")
            self._put("recipe", value, self.assumed, why)
        if self.axes["recipe"] == "bf16":
            return
        self._casts()
        self._take("fp8_all_gather")
        self._take("precompute_scale")
        if not self._take("pad_inner_dim") and (default := self._default("pad_inner_dim")):
            self._put("pad_inner_dim", default[0], self.assumed, default[1])
        self._output_layer()
        styles = self.axes["recipe"] == "tensorwise" and self._count("tp") > 1 and self._day < FLOAT8_STYLES
        if not self._take("tp_styles") and styles and self._program == "torchtitan":
            self._put("tp_styles", "float8", self.assumed, f"torchtitan's TP of tensorwise until {FLOAT8_STYLES}")

    def _mxfp8(self, block: Statement) -> None:
        """MXFP8, whose way of conversion `block` states."""
        mode, high = self._facts.get("scale_calculation_mode"), self._facts.get("wgrad_with_hp")
        conversion, _, rest = str(block.value).partition("_")
        floor = mode is not None and "floor" in str(mode.value).lower()
        in_high = bool(rest) or (high is not None and high.value is True)
        recipe = block_recipe(rounds_scales_down=floor, wgrad=not in_high)
        words = "; ".join(dict.fromkeys(statement.words for statement in (block, mode, high) if statement is not None))
        self._put("recipe", recipe or block_recipe(rounds_scales_down=floor, wgrad=True), self.stated, words)
        if recipe is None:
            self.missing["recipe"] = "no case has FLOOR with weight gradients in high precision: which of both was run?"
        if conversion != "module":
            self._put("conversion", conversion, self.stated, block.words)
        if self._count("tp") > 1:
            self._take("convert_after_tp")

    def _casts(self) -> None:
        statement = self._facts.get("casts")
        if statement is None:
            return
        casts = case_from_axes({"recipe": self.axes["recipe"], "casts": statement.value}).float8.casts
        if casts:
            self._put("casts", casts, self.stated, statement.words)
        if ROUNDED in self._facts:
            self.missing["casts"] = "scales of rows are powers of two here: was round_scales_to_power_of_2 set?"

    def _output_layer(self) -> None:
        filters = self._fact("filter_fqns")
        if filters is not None and isinstance(filters.value, tuple):
            known = [*(f"layers.0.{name}" for name in BLOCK_LINEARS), OUTPUT_FQN, "lm_head"]
            output = [filter_fqn for filter_fqn in filters.value if filter_fqn in OUTPUT_FQN or filter_fqn in "lm_head"]
            kept = tuple(filter_fqn for filter_fqn in filters.value if any(filter_fqn in fqn for fqn in known[:-2]))
            lost = [filter_fqn for filter_fqn in filters.value if not any(filter_fqn in fqn for fqn in known)]
            self.ignored += [
                f"filter_fqns {clean_words(filter_fqn)}: matches no linear of the Llama" for filter_fqn in lost
            ]
            if kept:
                self._put("filter_fqns", kept, self.stated, filters.words)
            if not output:
                self._put("output_layer", True, self.derived, f"{filters.words}: the output layer is not filtered")
        elif self._program == "torchtitan" and self._day < CONVERTED_OUTPUT:
            self._put("output_layer", True, self.assumed, f"torchtitan converted it until {CONVERTED_OUTPUT}")
        elif self._target != REFERENCE and self._day <= LAST_TOML and not self._file:  # named files have a filter
            self._put("output_layer", True, self.assumed, "torchtitan converts it where no filter names it")

    def _compile(self) -> None:
        components = self._facts.get("compile_components")
        statement = self._fact("compile")
        if components is not None and "model" not in shown(components.value):
            self.ignored.append(f"{components.words}: blocks are not compiled")
        elif self._take("compile") and self.axes["compile"] == "none":
            del self.axes["compile"]
        if "compile" not in self.axes and self.axes.get("async_tp"):
            if statement is None:
                self._put("compile", "graph", self.assumed, "async TP is a pass over compiled blocks")
            else:
                self._drop("async_tp", "without compiled blocks it is plain TP")
        elif "compile" not in self.axes and statement is None:
            self.assumed["compile"] = "none: nothing says that blocks were compiled"
        if "compile" in self.axes and self._count("tp") > 1 and self._program == "torchtitan":
            if self._target == REFERENCE:
                self.assumed["wait_for_embedding"] = "true: blocks that get an unfinished embedding are another bug"
            else:
                self._put("wait_for_embedding", False, self.assumed, "torchtitan hands blocks an unfinished embedding")

    def _checkpointing(self) -> None:
        mode = self._fact("checkpointing")
        default = self._default("checkpointing") if self._configured else None
        if mode is not None:
            named, words, where = str(mode.value), mode.words, self.stated
        elif "checkpointing" in self._file:
            named, words, where = str(self._file["checkpointing"]), self._of_file, self.assumed
        elif default is not None:
            named, words, where = str(default[0]), default[1], self.assumed
        else:
            self.assumed["checkpointing"] = "none: the report does not mention it"
            return
        if named == "selective":
            asked, option = self._selective()
            words = f"{words}; {option}"
            named = "selective_op" if asked == "op" else "selective_layer"
            if named == "selective_layer" and asked.isdigit() and int(asked) >= 1:
                self.axes["checkpoint_every"] = int(asked)
        self._put("checkpointing", named, where, words)

    def _selective(self) -> tuple[str, str]:
        option = self._fact("ac_option", "checkpointing")
        if option is not None:
            return str(option.value), option.words
        if "ac_option" in self._file:
            return str(self._file["ac_option"]), f"option {self._file['ac_option']} of {self._of_file}"
        value, why = self._default("ac_option") or ("op", "operators")
        return str(value), f'"{value}": {why}'

    def _model(self) -> None:
        named = self._facts.get("model_size")
        other = self._facts.get("model_name")
        size = self._file.get("model_size") or (other.value if other else "")
        name = str(named.value if named else size)
        is_llama = other is None or "llama" in str(other.value).lower()
        known = sizes_of_model(name, self._day) if is_llama else None
        where, words = (self.derived, named.words) if named else (self.assumed, self._of_file)
        if known is not None:
            for axis, size in known[1].items():
                self._put(axis, size, where, f"{words}: {known[0]}" if axis == "dim" else known[0])
        elif name and name != "llama3":
            self.derived["model"] = f"{clean_words(name)} becomes a small Llama: its linears are judged, not its layers"
        for axis in (*_SIZES, "pad_vocab_to_multiple_of", "tied"):
            self._take(axis)
        self._linears()
        if not any(axis in self.axes for axis in _SIZES):
            self.assumed["model"] = "tiny: no size is in the report"

    def _linears(self) -> None:
        """Sizes of a bare stack of linears; heads that divide its dim."""
        features = self._facts.get("linear")
        if features is not None and "dim" not in self.axes:
            words = f"{features.words}: linears of {str(features.value).replace('x', ' and ')} features, in a Llama"
            for axis, size in zip(("dim", "ffn_dim"), str(features.value).split("x"), strict=True):
                self._put(axis, int(size), self.derived, words)
        dim, tp = int(str(self.axes.get("dim", 128))), self._count("tp")
        heads = int(str(self.axes.get("heads", 8)))
        if "heads" in self.axes:
            self.axes.setdefault("kv_heads", heads)
        if dim % heads or dim // heads % 2 or heads % tp:
            fitting = [count for count in range(tp, dim // 2 + 1, tp) if dim % count == 0 and dim // count % 2 == 0]
            if fitting:
                for axis in ("heads", "kv_heads"):
                    self._put(axis, fitting[0], self.assumed, f"{fitting[0]} heads of {dim // fitting[0]} features")
            elif "dim" in self.axes:
                self.missing["dim"] = f"{dim} does not split into heads for {tp} TP ranks: which size has the model?"
                del self.axes["dim"]

    def _training(self) -> None:
        if not self._take("dtype"):
            self._put("dtype", "bfloat16", self.assumed, "what users run, and torchtitan by default")
        emulated, norm = self._facts.get("emulate"), self._facts.get("max_norm")
        if emulated is not None and emulated.value:
            self.ignored.append(f"{emulated.words}: FP8 is never emulated")
        if norm is not None:
            self.ignored.append(f"{norm.words}: clipping is compared in float64 alone: set dtype and max_norm for it")
        if self._take("parameter_dtype") and self.axes["dtype"] != "bfloat16":
            self._drop("parameter_dtype", "parameters in bfloat16 are those of runs in bfloat16")
        elif self._target != REFERENCE:
            self._drop("parameter_dtype", "a run of torchtitan with it was not measured")
        self._take("reduce_dtype")
        self._take("seq_len")
        dp = ranks_of(self.axes, DP_AXES)
        local, whole = self._facts.get("local_batch"), self._facts.get("global_batch")
        if local is not None or "local_batch" in self._file:
            count = max(1, int(str(local.value if local else self._file["local_batch"])))
            self._put("global_batch", count * dp, self.derived, f"{count} sequences x {dp} data-parallel ranks")
            (self.stated if local else self.assumed)["global_batch"] = local.words if local else self._of_file
        elif dp <= int(str(whole.value if whole else 0)) <= _LARGEST:
            self._take("global_batch")
        else:
            words = "2 sequences a data-parallel rank: no batch is in the report"
            self._put("global_batch", 2 * dp, self.assumed, words)
        self._accumulation(dp)
        self._length()

    def _length(self) -> None:
        """Steps up to the first bad one. A learning rate is only stated: a case has the one of its golden."""
        rate, trained = self._facts.get("learning_rate"), self._facts.get("train_steps")
        if rate is not None:
            self.ignored.append(f"{rate.words}: goldens have the learning rate of their cases: set lr where it matters")
        step = self._first_bad_step
        if step is not None and (step <= _LONGEST or self._as_reported):
            self._put("steps", max(5, step), self.derived, f"the first bad step is {step}")
        elif step is not None:
            self.assumed["steps"] = f"5; the first bad step is {step}: set steps to reach it"
        elif trained is not None and 1 <= int(str(trained.value)) <= _LONGEST:
            self._put("steps", trained.value, self.stated, trained.words)
        elif trained is not None:
            self.ignored.append(f"{trained.words}: most faults show in 5 steps: set steps where this one does not")

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

    def _pipeline(self) -> None:
        """A block for every stage at least, and as many microbatches as fill it."""
        ranks = self._count("pp")
        if ranks == 1:
            return
        if self.axes.get("compile", "none") != "none":
            self._drop("compile", "a pipeline trains microbatches, and compiled blocks whole batches")
        schedule = {"schedule": self.axes["schedule"]} if self._take("schedule") else {}
        stages = stage_count(msgspec.convert({"pp": ranks, **schedule}, Layout))
        if int(str(self.axes.get("layers") or MODEL_PRESETS["tiny"].layers)) < stages:
            self._put("layers", stages, self.derived, f"a block for each of {stages} stages")
        count, dp = self._count("accumulation"), ranks_of(self.axes, DP_AXES)
        if count % ranks:
            count = ranks * max(2, count // ranks)
            self._put("accumulation", count, self.derived, f"{count} microbatches fill the pipeline")
        if self._count("global_batch") % (dp * count):
            self._put("global_batch", dp * count, self.derived, f"a sequence for each of {count} microbatches")

    def _context(self) -> None:
        """The ranks that share sequences are counted as ranks of FSDP2, as torchtitan does not count them."""
        if not self._take("cp") or self._count("cp") == 1:
            return
        self._take("sequence_order")
        if self.axes.get("compile", "none") != "none":
            self._drop("compile", "one rank stands for all pieces of a sequence, in eager mode")
        stated, shards = self._count("cp"), self._count(REST)
        ranks = min(stated, _FEW_RANKS)
        if ranks < stated:
            self.full_size["cp"] = stated
            self._put("cp", ranks, self.derived, f"{stated} made smaller: {ranks}")
        if REST in self.stated or shards % ranks:
            self._put(REST, shards * ranks, self.derived, f"{shards} x {ranks} ranks that share parameters")
        if self._count("seq_len") < _PIECE * ranks:
            self._put("seq_len", _PIECE * ranks, self.derived, f"{_PIECE} positions for each of {ranks} ranks")

    def _experts(self) -> None:
        """As many experts and ranks that share them as the smaller run has room for."""
        taken = [axis for axis in ("experts", "top_k", "router", "balance", "ep") if self._take(axis)]
        if self.axes.get("experts", 0) == 0 and self._count("ep") == 1:
            for axis in taken:
                self._drop(axis, "means nothing without experts")
            return
        if "experts" not in taken:
            self._ask("experts", _FEW_EXPERTS, "how many experts?")
        if "grouped_mm" in shown(getattr(self._facts.get("converters"), "value", "")):
            self._put("grouped_mm", True, self.stated, self._facts["converters"].words)
        ranks, tp = self._count(REST) * self._count("tp"), self._count("tp")
        stated = {axis: self._count(axis) for axis in ("experts", "ep")}
        fitting = [degree for degree in range(tp, min(ranks, stated["ep"]) + 1, tp) if ranks % degree == 0]
        fits = {"ep": max(fitting, default=1)}
        if stated["experts"] > _FEW_EXPERTS and not self._as_reported:
            least = max(_FEW_EXPERTS, self._count("top_k"))
            fits["experts"] = -(-least // fits["ep"]) * fits["ep"]
        for axis, size in fits.items():
            if size < stated[axis]:
                self.full_size[axis] = stated[axis]
                self._put(axis, size, self.derived, f"{stated[axis]} made smaller: {size}")

    def _make_smaller(self) -> None:
        if self._as_reported:
            return
        try:
            values = axis_values(case_from_axes({**self.axes, "filter_fqns": ()}))
        except HarnessError:
            return
        wraps = values["checkpointing"] == "selective_layer"
        sizes = Sizes(
            **{name: int(str(values[name])) for name in (*_SIZES, "seq_len", *MESH_AXES)},
            local_batch=max(1, int(str(values["global_batch"])) // ranks_of(values, DP_AXES)),
            every=int(str(values["checkpoint_every"])) if wraps else 1,
        )
        small, arithmetic = made_smaller(sizes)
        for axis in [name for name in arithmetic if name in AXES]:
            self.full_size[axis] = getattr(sizes, axis)
            self._put(axis, getattr(small, axis), self.derived, arithmetic[axis])
        batch, before = small.local_batch * small.dp, values["global_batch"]
        if batch != before:
            if "global_batch" in {**self.stated, **self.derived}:
                self.full_size["global_batch"] = before
                words = f"{before} made smaller: {small.local_batch} sequences x {small.dp} data-parallel ranks"
                self._put("global_batch", batch, self.derived, words)
            self.axes["global_batch"] = batch
