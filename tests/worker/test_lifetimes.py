"""What uses memory again is collected, in whatever order; what was written to since is new."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness.trace.operands import Aged, Role
from harness.worker.probes.cast_numbers import Cast
from harness.worker.probes.casts import UNKNOWN, Lifetimes, Use
from harness.worker.tensors.digests import Content, Contents, bytes_of

FLOAT8 = torch.float8_e4m3fn


def new(model: nn.Module | None = None, microbatches: int = 2, gathered: tuple[str, ...] = ()) -> Lifetimes:
    lifetimes = Lifetimes(microbatches, Contents())
    lifetimes.attach(model or nn.Identity(), gathered)
    return lifetimes


def cast(life: Lifetimes, by: Any, source: torch.Tensor, bits: torch.Tensor, *, role: Role = "weight") -> torch.Tensor:
    scale = torch.full((), 2.0)
    content = Content(bytes_of(bits))
    life.cast(Use(0, by, role, "forward"), Cast(source, bits, scale, None), content)
    return scale


def bits(value: float = 1.0) -> torch.Tensor:
    return torch.full((4, 4), value).to(FLOAT8)


def ages(aged_uses: list[Aged]) -> list[tuple[str, int, int]]:
    return [(use.what, use.first_step, use.first_microbatch) for use in aged_uses]


def test_a_cast_is_of_its_step_and_a_new_one_is_new() -> None:
    life, kept, weight = new(), bits(), torch.ones(4, 4)
    scale = cast(life, life.begin(1, "wq", "forward"), weight, kept)
    assert life.end_step() == []
    again = life.begin(2, "wq", "forward")
    life.multiply(Use(0, again, "weight", "forward"), data=kept, scale=scale)
    life.multiply(Use(1, again, "weight", "forward"), data=bits(), scale=torch.full((), 2.0))
    assert ages(life.end_step()) == [("data", 1, 1), ("scale", 1, 1)]


@pytest.mark.parametrize("role", ["weight", "input", "grad_output"])
def test_microbatches_share_casts_of_weights_alone(role: Role) -> None:
    life, kept = new(), bits()
    scale = cast(life, life.begin(1, "wq", "forward"), torch.ones(4, 4), kept, role=role)
    life.multiply(Use(0, life.begin(1, "wq", "forward"), role, "forward"), data=kept, scale=scale)
    assert ages(life.end_step()) == ([] if role == "weight" else [("data", 1, 1), ("scale", 1, 1)])


def test_a_module_that_is_called_twice_for_a_microbatch_shares_its_input() -> None:
    life, kept = new(), bits()
    scale = cast(life, life.begin(1, "attention", "forward"), torch.ones(4, 4), kept, role="input")
    for _ in range(2):
        life.multiply(Use(0, life.begin(1, "wq", "forward"), "input", "forward"), data=kept, scale=scale)
    life.begin(1, "attention", "forward")
    for _ in range(2):
        life.begin(1, "wq", "forward")
    assert life.end_step() == []


@pytest.mark.parametrize("view", [lambda tensor: tensor, lambda tensor: tensor.detach().view(-1).view(4, 4)])
def test_a_buffer_that_was_written_to_is_new(view: Any) -> None:
    life, buffer = new(), bits()
    use = life.begin(1, "wq", "forward")
    life.multiply(Use(0, use, "weight", "forward"), data=view(buffer), scale=torch.full((), 2.0))
    life.end_step()
    buffer.copy_(bits(2.0))
    use = life.begin(2, "wq", "forward")
    life.multiply(Use(1, use, "weight", "forward"), data=view(buffer), scale=torch.full((), 2.0))
    assert life.end_step() == []


def test_bytes_tell_what_versions_do_not() -> None:
    life, buffer = new(), bits()
    scale = torch.full((), 2.0)
    life.multiply(Use(0, life.begin(1, "wq", "forward"), "weight", "forward"), data=buffer, scale=scale.clone())
    life.end_step()
    buffer.data.copy_(bits(2.0))  # the version stays
    life.multiply(Use(1, life.begin(2, "wq", "forward"), "weight", "forward"), data=buffer, scale=scale.clone())
    assert life.end_step() == []


def test_a_copy_of_a_weight_ages_and_the_weight_itself_does_not() -> None:
    linear = nn.Linear(4, 4, bias=False)
    copy = linear.weight.detach().clone()
    life = new(linear)
    for step, source in ((1, linear.weight), (2, linear.weight), (3, copy), (4, copy)):
        cast(life, life.begin(step, "wq", "forward"), source.detach(), bits())
        aged_uses = life.end_step()
        assert ages(aged_uses) == ([("source", 3, 1)] if step == 4 else []), step


def test_weights_that_fsdp_gathers_and_frozen_ones_have_no_age() -> None:
    copy, model = torch.ones(4, 4), nn.ModuleDict({"wq": nn.Linear(4, 4, bias=False).requires_grad_(False)})
    for life in (new(gathered=("wq",)), new(model)):
        for step in (1, 2):
            cast(life, life.begin(step, "wq", "forward"), copy, bits())
        assert life.end_step() == []


def test_a_scale_of_another_tensor_is_named_with_that() -> None:
    life, scale, sources = new(), torch.full((), 2.0), torch.ones(2, 4, 4)
    for fqn, source in zip(("wq", "wk"), sources, strict=True):
        data = bits()
        use = Use(0, life.begin(1, fqn, "forward"), "input", "forward")
        life.cast(use, Cast(source, data, scale, None), Content(bytes_of(data)))
    (aged_use,) = life.end_step()
    assert (aged_use.what, aged_use.fqn, aged_use.first_fqn) == ("other_scale", "wk", "wq")


@pytest.mark.parametrize(("fqn", "what"), [("wq", "scale"), ("wk", "other_scale")])
def test_a_copy_of_a_weight_is_the_same_tensor_and_that_of_another_module_is_not(fqn: str, what: str) -> None:
    life, scale = new(), torch.full((), 2.0)
    for step, by in ((1, "wq"), (2, fqn)):
        copied = Cast(torch.ones(4, 4), bits(), scale, None)
        life.cast(Use(0, life.begin(step, by, "forward"), "weight", "forward"), copied, Content(bytes_of(copied.bits)))
        aged_uses = life.end_step()
    assert [use.what for use in aged_uses] == [what]


def test_a_constant_scale_of_one_may_be_kept() -> None:
    life, one = new(), torch.ones(())
    for step in (1, 2):
        life.multiply(Use(0, life.begin(step, "wq", "forward"), "weight", "forward"), data=bits(), scale=one)
        assert life.end_step() == []


def test_outside_of_known_modules_steps_are_compared_alone_and_the_first_reader_is_named() -> None:
    life, kept = new(), bits()
    scale = cast(life, life.begin(1, "wq", "forward"), torch.ones(4, 4), kept, role="input")
    life.multiply(Use(0, life.begin(1, UNKNOWN, "forward"), "input", "forward"), data=kept, scale=scale)
    assert life.end_step() == []
    life.multiply(Use(0, life.begin(2, UNKNOWN, "forward"), "input", "forward"), data=kept, scale=scale)
    assert [(use.fqn, use.what) for use in life.end_step()] == [("wq", "data"), ("wq", "scale")]


def test_freed_memory_is_forgotten() -> None:
    life = new()
    life.multiply(Use(0, life.begin(1, "wq", "forward"), "weight", "forward"), data=bits(), scale=torch.ones(()))
    life.end_step()
    assert life._first == {}
