"""Where tensors are: what names a GPU to torch gets the CPU, in every thread and below every operator.

A mode of torch functions sees the calls of scripts and libraries. What operators ask for inside of others is made by
kernels, and what is no function of torch is replaced.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from harness.plugins.exec.worker.script import is_of_script

CPU = torch.device("cpu")


def is_cuda(place: object) -> bool:
    """Return True for "cuda", "cuda:1" and such a device."""
    if isinstance(place, str):
        return place == "cuda" or place.startswith("cuda:")
    return isinstance(place, torch.device) and place.type == "cuda"


def on_cpu(place: Any) -> Any:
    """Return CPU for a GPU, and any other value as it is."""
    if not is_cuda(place):
        return place
    index = torch.device(place).index
    if index is not None:
        _named[:] = [index]
    return CPU


# Tensors in memory of the host, by id: a script made them where it named no GPU, or moved them there. All others count
# as on the GPU, since what libraries make there is told from what they make on the host by nothing.
_HOST: dict[int, weakref.ref[torch.Tensor]] = {}
_HERE = __file__
_TENSORS = (torch.Tensor, list, tuple)
_named: list[int] = []  # the number of the GPU that was named last


def _keep_on_host(made: Any) -> Any:
    for tensor in (made,) if isinstance(made, torch.Tensor) else made:
        if isinstance(tensor, torch.Tensor):
            key = id(tensor)
            _HOST[key] = weakref.ref(tensor, lambda _, key=key: _HOST.pop(key, None))  # type: ignore[misc]
    return made


@functools.cache
def _of_script(file: str) -> bool:
    return is_of_script(file)


def _asks_by_itself() -> bool:
    """Return True where a line of the script calls, and no library: one that asks where a tensor is works on a CPU."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == _HERE and frame.f_back is not None:
        frame = frame.f_back
    return _of_script(frame.f_code.co_filename)


class _OnCpu(TorchFunctionMode):
    """Every call of torch that names a GPU gets the CPU instead."""

    default_is_gpu = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = _OWN.get(func)
        if own is not None:
            return own(func, *args, **(kwargs or {}))
        compiles = torch.compiler.is_compiling()  # Dynamo traces this function
        if not compiles and (own := _ASKED.get(func)) is not None:
            return own(func, *args)
        place = None
        for value in args:
            if is_cuda(value):
                place, args = value, tuple(on_cpu(value) for value in args)
                break
        if kwargs:
            place = place if kwargs.get("device") is None else kwargs["device"]
            kwargs = _mapped(kwargs)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if compiles or not isinstance(result, _TENSORS):
            return result
        if place is None and args and id(args[0]) not in _HOST and isinstance(args[0], torch.Tensor):
            return result  # the usual case, as `_is_of_host` tells it
        return _keep_on_host(result) if _is_of_host(args, kwargs or {}, place) else result


def _mapped(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    if "device" in kwargs:
        device = kwargs["device"]
        number = isinstance(device, int) and not isinstance(device, bool)
        kwargs = {**kwargs, "device": CPU if number else on_cpu(device)}
    return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs


def _is_of_host(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: Any) -> bool:
    """Return True where a call makes a tensor on the host: all that it gets are there, or it gets and names none."""
    given = args[0] if args and isinstance(args[0], list | tuple) else (*args, *kwargs.values())
    first = next((value for value in given if isinstance(value, torch.Tensor)), None)
    if first is not None and (place is None or not is_cuda(place)):
        return id(first) in _HOST and all(id(value) in _HOST for value in given if isinstance(value, torch.Tensor))
    if place is None:
        return first is None and not _OnCpu.default_is_gpu
    return not is_cuda(place) and not isinstance(place, int) and _asks_by_itself()


def _to(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return what moving a tensor gives: a copy where it was elsewhere, as on a GPU, and else the tensor itself."""
    args, kwargs = _named_by_number(args, kwargs)
    places = [place for place in (*args[:1], kwargs.get("device")) if isinstance(place, str | torch.device)]
    like = [id(other) in _HOST for other in args[:1] if isinstance(other, torch.Tensor)]
    to_gpu, to_host = any(map(is_cuda, places)) or like == [False], any(place in ("cpu", CPU) for place in places)
    moved = func(tensor, *map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})
    if torch.compiler.is_compiling():
        return moved
    was_on_host, by_script = id(tensor) in _HOST, to_host and _asks_by_itself()
    stays = was_on_host if by_script else not was_on_host and not to_host
    may_copy = was_on_host or not (tensor.requires_grad and tensor.is_leaf)  # what a library moves may be a parameter
    if moved is tensor and (to_gpu or to_host) and not stays and may_copy and not tensor.is_meta:
        moved = tensor.clone()
    return _keep_on_host(moved) if by_script or (was_on_host and not to_gpu and not to_host) else moved


def _named_by_number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the name of a GPU in place of its number."""
    if args and isinstance(args[0], int) and not isinstance(args[0], bool):
        args = (f"cuda:{args[0]}", *args[1:])
    return args, kwargs | {"device": f"cuda:{kwargs['device']}"} if isinstance(kwargs.get("device"), int) else kwargs


def _cuda(func: Callable[..., Any], tensor: torch.Tensor, device: Any = None, *_: Any, **__: Any) -> Any:
    return _to(torch.Tensor.to, tensor, "cuda" if device is None else device)


def _cpu(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    moved = _to(torch.Tensor.to, tensor, "cpu")
    return moved if torch.compiler.is_compiling() else _keep_on_host(moved)


def _set_data(func: Callable[..., Any], tensor: torch.Tensor, value: torch.Tensor) -> None:
    func(tensor, value)
    if id(value) in _HOST:
        _keep_on_host(tensor)
    else:
        _HOST.pop(id(tensor), None)


def _device_of(func: Callable[..., Any], tensor: torch.Tensor) -> Any:
    """Return the GPU of a tensor to a line of the script."""
    place = func(tensor)
    if place != CPU or id(tensor) in _HOST or not _asks_by_itself():
        return place
    return torch.device("cuda", _named[-1] if _named else torch.cuda.current_device())


def _is_cuda(func: Callable[..., Any], tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and id(tensor) not in _HOST and _asks_by_itself()


def _is_cpu(func: Callable[..., Any], tensor: torch.Tensor) -> bool:
    return bool(func(tensor)) and (id(tensor) in _HOST or not _asks_by_itself())


def _get_device(func: Callable[..., Any], tensor: torch.Tensor) -> Any:
    return -1 if _device_of(_TENSOR.device.__get__, tensor) == CPU else torch.cuda.current_device()


def _pin_memory(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    _note("torch.Tensor.pin_memory", "does nothing")
    return tensor


def _type(func: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    name = args[0].replace("torch.cuda.", "torch.") if args and isinstance(args[0], str) else None
    return func(tensor, *((name,) if name else args[:1]), *args[1:], **kwargs)


def _parse_to(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A module is moved to GPU 0 by that number too."""
    args, kwargs = _named_by_number(args, kwargs)
    return func(*args, **kwargs)


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
    torch._C._nn._parse_to: _parse_to,
    torch.device: _device,
}
# What asks where a tensor is. Not for Dynamo, which has its own answers.
_TENSOR: Any = torch.Tensor  # whose attributes torch annotates as values
_ASKED: dict[Any, Callable[..., Any]] = {
    _TENSOR.device.__get__: _device_of,
    _TENSOR.is_cuda.__get__: _is_cuda,
    _TENSOR.is_cpu.__get__: _is_cpu,
    _TENSOR.get_device: _get_device,
    _TENSOR.data.__set__: _set_data,
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
    default = torch.set_default_device

    def set_default_device(device: Any) -> None:
        _OnCpu.default_is_gpu = is_cuda(device) or isinstance(device, int)
        default(device)

    torch.set_default_device = set_default_device
    # No function of torch gets the stream of a pretended GPU.
    _TENSOR.record_stream = lambda self, stream: None
    setattr(torch, "Generator", Generator)  # noqa: B010  mypy rejects assigning to a type
    load = torch.load

    def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        named = map_location is None or isinstance(map_location, str | torch.device | int)
        loaded = load(f, "cpu" if named else map_location, *args, **kwargs)
        if map_location in ("cpu", CPU):
            _keep_on_host(tree_leaves(loaded))
        return loaded

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
