"""One torchao CastConfig for three operands: what float8 dtype gradients are cast to."""

from torchao.float8 import CastConfig, Float8LinearConfig

shared = CastConfig()
config = Float8LinearConfig(cast_config_input=shared, cast_config_weight=shared, cast_config_grad_output=shared)
separate = Float8LinearConfig(
    cast_config_input=CastConfig(), cast_config_weight=CastConfig(), cast_config_grad_output=CastConfig()
)
expected, actual = separate.cast_config_grad_output.target_dtype, config.cast_config_grad_output.target_dtype
print("expected:", expected, "for gradients, with three equal CastConfig objects")
print("actual:  ", actual, "for gradients, with the same CastConfig object three times")
print("expected:", CastConfig(), "is what the caller's frozen CastConfig() stays")
print("actual:  ", shared)
raise SystemExit(actual != expected or shared != CastConfig())
