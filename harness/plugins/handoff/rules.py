"""Every way in which a hand-off can be wrong. `advice.toml` says what each means, its usual causes and what to do."""

from harness.checks.check import Rules, Stage

_rule = Rules("handoff", Stage.VALUES, located=True)

MISSING = _rule("missing", "{module} is not exported", stage=Stage.MODEL)
EXTRA = _rule("extra", "{module} is not in the source", stage=Stage.MODEL)
NO_SCALE = _rule("no-scale", "{module} is {dtype} and has no scale", stage=Stage.MODEL)
STRAY = _rule("stray-scale", "{module} is a scale, and its weight is not there or not quantized", stage=Stage.MODEL)
SHAPE = _rule("shape", "{module} is exported as {here}, and must be {there}{why}", stage=Stage.MODEL)
DTYPE = _rule("dtype", "{what} of {module} is {dtype}, which {format} has not", stage=Stage.MODEL)
NOT_QUANTIZED = _rule("not-quantized", "nothing that is exported is quantized", stage=Stage.MODEL)
REPLICAS = _rule("replicas", "{ranks} hold other values of {module} at the same place", stage=Stage.DATA)
GAP = _rule("gap", "shards of all ranks leave out {count:n value} of {module}", stage=Stage.DATA)
GATHER = _rule("gather", "{module} is not what one rank exports: {count:n byte} differ", stage=Stage.COLLECTIVES)
NUMBER = _rule(
    "number", "{count:n value is|values are} not finite in {module}{where}", numeric=True, stage=Stage.SCALES
)
SCALE_RANGE = _rule(
    "scale-range", "{count:n scale is|scales are} not positive and finite in {module}", stage=Stage.SCALES
)
POWER = _rule("power-of-two", "{count:n scale is|scales are} no power of two in {module}", stage=Stage.SCALES)
SCALE = _rule("scale", "{module} was not quantized with the scales beside it: {how}", stage=Stage.SCALES, key=("how",))
WIDE = _rule("too-large-scale", "scales of {module} are larger than its values need", numeric=True, stage=Stage.SCALES)
ORDER = _rule("order", "{module} holds {what}", key=("what",))
VALUES = _rule("values", "{count:n value is|values are} more than half a quantum off in {module}{like}", numeric=True)
ROUNDED = _rule(
    "rounding", "{count:n value is|values are} not the source rounded to {dtype} in {module}{like}", numeric=True
)
PADDING = _rule("padding", "{count:n value is|values are} not zero behind the end of the source in {module}")
STALE = _rule("stale", "{module} is still the one of the first hand-off", stage=Stage.DATA)
MOVED = _rule("moved", "{module} changed, although its source did not", stage=Stage.DATA)
ALIASED = _rule("aliased", "{module} {how}", stage=Stage.DATA, key=("how",))
IDEMPOTENT = _rule("not-idempotent", "exported again after it was loaded, {count:n byte} of {module} differ")
CONVERTED = _rule("converted", "{module} is {here} here, and {there} by {list}", stage=Stage.MODEL)
AGREES = _rule(
    "agreement", "{field} of {module} is {here} here, and {there} by {list}", stage=Stage.MODEL, key=("field",)
)
FUSED_PARTS = _rule("fused-parts", "parts that are fused to {module} are not all converted", stage=Stage.MODEL)

RULES = _rule.declared
