"""The GPU that a script is shown: `torch.cuda` and `torch.accelerator` answer as if there were some, and "cuda" is CPU.

Tensors that are asked for on "cuda" are made on the CPU by a mode of torch functions, which every thread enters, and by
kernels below it for what operators ask for themselves. What a CPU lacks is noted where a script uses it (`script.py`),
or refused: nothing is computed otherwise than a GPU would.
"""

import collections
import importlib.abc
import importlib.util
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch.overrides import TorchFunctionMode

from harness.errors import HarnessError
from harness.plugins.exec.request import Gpu
from harness.plugins.exec.worker.script import ENDING, line_of_frame

CPU = torch.device("cpu")
_TORCH = str(Path(torch.__file__).parent) + os.sep
_HERE = str(Path(__file__).parent) + os.sep
_PROCESSORS = {(8, 9): 128, (9, 0): 132, (10, 0): 148}  # multiprocessors, of NVIDIA's data sheets
_CUDA = "12.9"


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
    note("torch.Tensor.pin_memory", "does nothing")
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


def note(name: str, effect: str) -> None:
    """Note what a script uses. What torch itself calls is not the script's."""
    if torch.compiler.is_compiling():
        return
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    if frame is not None and not frame.f_code.co_filename.startswith(_TORCH):
        ENDING.lacks(name, effect)


class Unsupported(HarnessError, RuntimeError):
    """A script calls what no CPU can do."""


def refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function that raises for what has no body here, and says so by name and with the line."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        ENDING.lacks(name, "raised")
        raise Unsupported(f"{name} needs a GPU.", where=line_of_frame(sys._getframe(1)) or None, fix=instead)

    return refuse


class Stream:
    """A stream of the pretended GPU, on which everything is done already."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self.device_index = torch.cuda.current_device()
        self.device = torch.device("cuda", self.device_index)
        self.device_type, self.stream_id, self.cuda_stream = 1, 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


class Event:
    """An event of the pretended GPU: its time is that of this machine."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds between two events, of the CPU."""
        note("torch.cuda.Event.elapsed_time", "returns the time of this CPU")
        return 1000 * (end._at_s - self._at_s)


class _Within:
    """A context of `torch.cuda.device` or `torch.cuda.stream`, which changes nothing here but the current device."""

    def __init__(self, given: Any = None) -> None:
        self.idx = given
        self.prev_idx, self.stream = -1, given

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *_: object) -> None:
        pass


_EXEMPT = "leave it out here: it changes speed, not numbers"
# What does nothing, by the name in `torch.cuda`; what returns a constant; what has no body.
_QUIET = "init _lazy_init _lazy_call set_stream ipc_collect set_sync_debug_mode set_per_process_memory_fraction"
_SILENT = (
    "synchronize empty_cache reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached "
    "reset_accumulated_memory_stats reset_peak_host_memory_stats"
)
_ZERO = (
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached "
    "utilization memory_usage temperature power_draw clock_rate device_memory_used"
)
_REFUSED = {
    "CUDAGraph": "run without CUDA graphs here",
    "graph": "run without CUDA graphs here",
    "make_graphed_callables": "run without CUDA graphs here",
    "graph_pool_handle": "run without CUDA graphs here",
    "MemPool": _EXEMPT,
    "CUDAPluggableAllocator": _EXEMPT,
    "cudart": _EXEMPT,
    "jiterator": _EXEMPT,
    "memory_snapshot": _EXEMPT,
}


class Pretended:
    """How many GPUs this process is shown, and which one is current."""

    def __init__(self, gpu: Gpu, count: int) -> None:
        self.gpu, self.count, self.current = gpu, count, 0

    def index_of(self, device: Any = None) -> int:
        """Return the number of a GPU. Raises RuntimeError, as CUDA does, for one that is not there."""
        if device is None:
            return self.current
        index = device if isinstance(device, int) else torch.device(device).index
        index = self.current if index is None or index < 0 else int(index)
        if index >= self.count:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return index

    def set_current(self, device: Any) -> None:
        self.current = self.index_of(device)

    def exchange(self, device: Any) -> int:
        before, self.current = self.current, self.index_of(device)
        return before

    def properties(self, device: Any = None) -> types.SimpleNamespace:
        """Return what `torch.cuda.get_device_properties` does."""
        self.index_of(device)
        major, minor = self.gpu.capability
        return types.SimpleNamespace(
            name=self.gpu.name,
            major=major,
            minor=minor,
            total_memory=self.gpu.memory_gib << 30,
            multi_processor_count=_PROCESSORS[self.gpu.capability],
            warp_size=32,
            max_threads_per_multi_processor=1536 if major == 8 else 2048,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=101376 if major == 8 else 232448,
            L2_cache_size=50 << 20,
            is_integrated=0,
            is_multi_gpu_board=0,
            gcnArchName=self.gpu.name,
            uuid="00000000-0000-0000-0000-000000000000",
        )


def _answers(shown: Pretended) -> dict[str, Any]:
    """Return what stands in `torch.cuda`, by name. Each is a function of its own: Dynamo tells them apart so."""
    total = shown.gpu.memory_gib << 30
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: shown.count,
        "current_device": lambda: shown.current,
        "set_device": shown.set_current,
        "get_device_name": lambda device=None: shown.gpu.name,
        "get_device_capability": lambda device=None: shown.gpu.capability,
        "get_device_properties": shown.properties,
        "get_arch_list": lambda: ["sm_{}{}".format(*shown.gpu.capability)],
        "get_gencode_flags": lambda: "",
        "can_device_access_peer": lambda device, peer: True,
        "mem_get_info": lambda device=None: (total, total),
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "get_sync_debug_mode": lambda: 0,
        "get_allocator_backend": lambda: "native",
        "memory_stats": lambda device=None: collections.defaultdict(int),
        "memory_stats_as_nested_dict": lambda device=None: {},
        "memory_summary": lambda device=None, abbreviated=False: "no GPU: nothing is counted",
        "list_gpu_processes": lambda device=None: "no GPU: nothing is counted",
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)) and None,
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(int(seed)) and None,
        "seed": lambda: torch.default_generator.seed() and None,
        "seed_all": lambda: torch.default_generator.seed() and None,
        "initial_seed": torch.default_generator.initial_seed,
        "get_rng_state": lambda device="cuda": torch.default_generator.get_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.default_generator.set_state(new_state) and None,
        "get_rng_state_all": lambda: [torch.default_generator.get_state()] * shown.count,
        "set_rng_state_all": lambda new_states: torch.default_generator.set_state(new_states[0]) and None,
        "current_stream": lambda device=None: Stream(device),
        "default_stream": lambda device=None: Stream(device),
        "current_blas_handle": lambda: 0,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "device": type("device", (_Within,), {}),
        "device_of": type("device_of", (_Within,), {}),
        "_DeviceGuard": type("_DeviceGuard", (_Within,), {}),
        "stream": type("stream", (_Within,), {}),
        "StreamContext": type("StreamContext", (_Within,), {}),
        "default_generators": (torch.default_generator,) * max(shown.count, 1),
    }
    answers |= {name: _stub(name, None, "") for name in _QUIET.split()}
    answers |= {name: _stub(name, None, "does nothing") for name in _SILENT.split()}
    answers |= {name: _stub(name, 0, "returns 0") for name in _ZERO.split()}
    return answers | {name: refusing(f"torch.cuda.{name}", fix) for name, fix in _REFUSED.items()}


def _stub(name: str, result: Any, effect: str) -> Callable[..., Any]:
    def stub(*_: Any, **__: Any) -> Any:
        if effect:
            note(f"torch.cuda.{name}", effect)
        return result

    stub.__name__ = name
    return stub


def install(gpu: Gpu, count: int) -> Pretended:
    """Show so many GPUs of a kind to this process and its forks from now on."""
    shown = Pretended(gpu, count)
    answers = _answers(shown)
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs):
        for name, answer in answers.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, answer)
    _accelerator(shown)
    torch.version.cuda = _CUDA
    _nvtx()
    _classes()
    _below_the_mode()
    _threads()
    _compiler()
    _extensions()
    return shown


def _accelerator(shown: Pretended) -> None:
    core: Any = torch._C
    cuda = torch.device("cuda")
    core._accelerator_getAccelerator = core._get_accelerator = lambda *_: cuda
    core._accelerator_getDeviceIndex = lambda: shown.current
    core._accelerator_setDeviceIndex = shown.set_current
    core._accelerator_exchangeDevice = core._accelerator_maybeExchangeDevice = shown.exchange
    core._accelerator_getStream = lambda *_: Stream()
    core._accelerator_setStream = lambda *_: None
    core._accelerator_synchronizeDevice = lambda *_: None
    core._accelerator_getDeviceStats = lambda *_: {}
    core._accelerator_getMemoryInfo = lambda *_: (shown.gpu.memory_gib << 30,) * 2
    for name in ("emptyCache", "emptyHostCache", "resetPeakStats", "resetAccumulatedStats"):
        setattr(core, f"_accelerator_{name}", lambda *_: None)
    core._accelerator_isAllocatorInitialized = lambda *_: False
    torch.accelerator.device_count = lambda: shown.count
    torch.accelerator.is_available = lambda: True


def _nvtx() -> None:
    from torch.cuda import nvtx, profiler

    marks: Any = types.SimpleNamespace(
        rangePushA=lambda *_: 0, rangePop=lambda: 0, rangeStartA=lambda *_: 0, rangeEnd=lambda *_: None,
        markA=lambda *_: None, deviceRangeStart=lambda *_: None, deviceRangeEnd=lambda *_: None,
    )  # fmt: skip
    setattr(nvtx, "_nvtx", marks)  # noqa: B010  it is not exported
    profiler.start = profiler.stop = _stub("profiler", None, "does nothing")
    torch.cuda.nccl.version = lambda: (2, 27, 5)


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


def _compiler() -> None:
    """Execute what inductor would compile, as compiled cases do: no code is generated."""
    inductor: Any = torch._TorchCompileInductorWrapper

    def compiled(self: Any, model: Any, inputs: Any) -> Any:
        from harness.worker.virtual import device

        device.install(compiled=True)  # imports inductor
        from harness.worker.virtual.graph_backend import graph_backend

        if self.config.get("triton.cudagraphs"):
            note("torch.compile with CUDA graphs", "runs without CUDA graphs")
        return graph_backend(model, inputs)

    inductor.__call__ = compiled


class _Extensions(importlib.abc.MetaPathFinder):
    """Refuses to build CUDA code when the module that builds it is imported, which takes long."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch.utils.cpp_extension":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def with_refusals(module: Any) -> None:
            execute(module)
            for kind in ("load", "load_inline", "CUDAExtension"):
                stock = getattr(module, kind)
                setattr(module, kind, _without_cuda(f"{name}.{kind}", stock))

        spec.loader.exec_module = with_refusals
        return spec


def _without_cuda(name: str, build: Callable[..., Any]) -> Callable[..., Any]:
    """Return what builds code for a CPU, and refuses code for a GPU by its name."""
    refuse = refusing(name, "give the script an implementation in torch: no CPU runs CUDA code")

    def checked(*args: Any, **given: Any) -> Any:
        sources = str((*args[1:2], given.get("sources", ()), given.get("cuda_sources", "")))
        cuda = given.get("cuda_sources") or given.get("with_cuda") or ".cu" in sources or "CUDA" in name
        return (refuse if cuda else build)(*args, **given)

    return checked


def _extensions() -> None:
    sys.meta_path.insert(0, _Extensions())


def _threads() -> None:
    """Enter the mode in this thread and in all that begin later."""
    thread: Any = threading.Thread
    stock = thread._bootstrap_inner

    def begin(self: threading.Thread) -> None:
        with _OnCpu():
            stock(self)

    thread._bootstrap_inner = begin
    _OnCpu().__enter__()
