"""Where tensors are: what names a GPU to torch gets the CPU, in every thread and below every operator.

A mode of torch functions sees the calls of scripts and libraries. What operators ask for inside of others is made by
kernels, and what is no function of torch is replaced.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def is_cuda(place: object) -> bool:
    """Return True for "cuda", "cuda:1" and such a device."""
    if isinstance(place, str):
        return place == "cuda" or place.startswith("cuda:")
    return isinstance(place, torch.device) and place.type == "cuda"


def on_cpu(place: Any) -> Any:
    """Return CPU for a GPU, and any other value as it is."""
    return CPU if is_cuda(place) else place


class _OnCpu(TorchFunctionMode):
    """Every call of torch that names a GPU gets the CPU instead."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = _OWN.get(func)
        if own is not None:
            return own(func, *args, **(kwargs or {}))
        for value in args:
            if is_cuda(value):
                args = tuple(on_cpu(value) for value in args)
                break
        if not kwargs:
            return func(*args)
        if "device" in kwargs:
            device = kwargs["device"]
            number = isinstance(device, int) and not isinstance(device, bool)
            kwargs = {**kwargs, "device": CPU if number else on_cpu(device)}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _to(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return what moving a tensor gives: a copy to the host, as a GPU's is, and the tensor itself on the GPU."""
    places = (*args[:1], kwargs.get("device"))
    if any(isinstance(place, int) and not isinstance(place, bool) for place in args[:1]):
        args = ("cuda", *args[1:])
        places = args[:1]
    to_gpu = any(map(is_cuda, places))
    to_host = any(place in ("cpu", CPU) for place in places if isinstance(place, str | torch.device))
    if isinstance(kwargs.get("device"), int):
        kwargs["device"], to_gpu = CPU, True
    staged = to_gpu and (kwargs.get("non_blocking") or any(value is True for value in args[1:2]))
    moved = func(tensor, *map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})
    if moved is tensor and (to_host or staged) and not tensor.is_meta and not _is_leaf_of_gradients(tensor):
        return tensor.clone()
    return moved


def _is_leaf_of_gradients(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def _cuda(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _to(torch.Tensor.to, tensor, "cuda", non_blocking=bool(kwargs.get("non_blocking", args[1:2] == (True,))))


def _cpu(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _to(torch.Tensor.to, tensor, "cpu")


def _pin_memory(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    _note("torch.Tensor.pin_memory", "does nothing")
    return tensor


def _type(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    name = args[0].replace("torch.cuda.", "torch.") if args and isinstance(args[0], str) else None
    return func(tensor, *((name,) if name else args[:1]), *args[1:], **kwargs)


def _parse_to(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A module is moved to GPU 0 by that number too."""
    first = args[:1]
    if first and isinstance(first[0], int) and not isinstance(first[0], bool):
        first = (f"cuda:{first[0]}",)
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = f"cuda:{kwargs['device']}"
    return func(*first, *args[1:], **kwargs)


def _device(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A number alone is that of a GPU."""
    number = len(args) == 1 and isinstance(args[0], int) and not kwargs
    return func("cuda", *args) if number else func(*args, **kwargs)


_OWN: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.type: _type,
    torch.Tensor.pin_memory: _pin_memory,
    torch.Tensor.record_stream: lambda *_, **__: None,
    torch._C._nn._parse_to: _parse_to,
    torch.device: _device,
}


_NOTES: list[Callable[[str, str], None]] = []


def _note(name: str, effect: str) -> None:
    for note in _NOTES:
        note(name, effect)


def install(note: Callable[[str, str], None]) -> None:
    """Map GPUs to the CPU from now on. `note` is told what does nothing."""
    _NOTES.append(note)
    _classes()
    _below_the_mode()
    _threads()


def _classes() -> None:
    """Map what is told a device and is no function of torch."""
    from torch.utils import _device

    generator = torch.Generator

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, generator)

    class Generator(metaclass=Kind):
        def __new__(cls, device: Any = "cpu") -> Any:
            return generator(device=CPU if isinstance(device, int) else on_cpu(device))

    context, stock = _device.DeviceContext, _device.DeviceContext.__init__

    def entered(self: Any, device: Any) -> None:
        stock(self, CPU if isinstance(device, int) else on_cpu(torch.device(device)))

    context.__init__ = entered  # type: ignore[method-assign]
    setattr(torch, "Generator", Generator)  # noqa: B010  mypy rejects assigning to a type
    load = torch.load

    def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        named = map_location is None or isinstance(map_location, str | torch.device | int)
        return load(f, "cpu" if named else map_location, *args, **kwargs)

    torch.load = load_on_cpu
    torch.serialization.load = load_on_cpu


def _below_the_mode() -> None:
    """Operators that run inside of another one are not seen by the mode: they may ask for memory of a GPU too."""
    from harness.worker.process.process import PROCESS

    library = torch.library.Library("aten", "IMPL")

    def empty(size: Sequence[int], *, memory_format: Any = None, **given: Any) -> torch.Tensor:
        return torch.ops.aten.empty.memory_format(size, memory_format=memory_format, **_without(given))

    def empty_strided(size: Sequence[int], stride: Sequence[int], **given: Any) -> torch.Tensor:
        return torch.ops.aten.empty_strided.default(size, stride, **_without(given))

    library.impl("empty.memory_format", empty, "CUDA")
    library.impl("empty_strided", empty_strided, "CUDA")
    PROCESS.keep("memory of a pretended GPU", library)


def _without(given: Mapping[str, Any]) -> dict[str, Any]:
    return {**given, "device": CPU, "pin_memory": False}


def _threads() -> None:
    """Enter the mode in this thread and in all that begin later."""
    thread: Any = threading.Thread
    stock = thread._bootstrap_inner

    def begin(self: threading.Thread) -> None:
        with _OnCpu():
            stock(self)

    thread._bootstrap_inner = begin
    _OnCpu().__enter__()
