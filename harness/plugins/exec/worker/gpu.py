"""The GPU that a script is shown: `torch.cuda` and `torch.accelerator` answer as if there were some, and "cuda" is CPU.

Tensors that are asked for on "cuda" are made on the CPU by a mode of torch functions, which every thread enters, and by
kernels below it for what operators ask for themselves. What a CPU lacks is noted where a script uses it (`script.py`),
or refused: nothing is computed otherwise than a GPU would.
"""

import collections
import contextlib
import ctypes
import os
import re
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from harness.errors import HarnessError
from harness.plugins.exec.request import Gpu
from harness.plugins.exec.worker import places
from harness.plugins.exec.worker.imports import after_import
from harness.plugins.exec.worker.script import ENDING, is_of_script, line_of_frame

_TORCH = str(Path(torch.__file__).parent) + os.sep
_HERE = str(Path(__file__).parent) + os.sep
_PROCESSORS = {(8, 9): 128, (9, 0): 132, (10, 0): 148}  # multiprocessors, of NVIDIA's data sheets
_CUDA = "12.9"
_OF_CUDA = re.compile(r"lib(cuda|cudart|cublas|cublasLt|cudnn|cufft|curand|cusolver|cusparse|nccl|nvrtc|nvidia-ml)\b")


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


class NoLibrary(Unsupported, OSError):
    """A script loads a library of CUDA."""


def refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a function that raises for what has no body here, and says so by name and with the line."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        ENDING.lacks(name, "raised")
        raise Unsupported(f"{name} needs a GPU.", where=line_of_frame(sys._getframe(1)) or None, fix=instead)

    return refuse


def _nothing(*_: Any) -> None:
    """Do nothing: what was to be done is done already."""


class Stream:
    """A stream of the pretended GPU, on which everything is done already."""

    _made = 0
    wait_event = wait_stream = synchronize = __exit__ = _nothing

    def __init__(self, device: Any = None, priority: int = 0, *, default: bool = False, **_: Any) -> None:
        self.priority = priority
        self.device_index = torch.cuda.current_device()
        self.device = torch.device("cuda", self.device_index)
        Stream._made += not default
        self.device_type, self.stream_id = 1, 0 if default else Stream._made
        self.cuda_stream = self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id

    def __enter__(self) -> Self:
        return self

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


class Event:
    """An event of the pretended GPU: its time is that of this machine."""

    wait = synchronize = _nothing
    query = Stream.query

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds between two events, of the CPU."""
        note("torch.cuda.Event.elapsed_time", "returns the time of this CPU")
        return 1000 * (end._at_s - self._at_s)


class _Within(contextlib.ContextDecorator):
    """A context of `torch.cuda.device` or `torch.cuda.stream`: what it is given is current in it."""

    def __init__(self, name: str, shown: "Pretended", given: Any = None) -> None:
        self.idx, self.stream, self.prev_idx = given, given, -1
        self._name, self._shown, self._before = name, shown, list[Any]()

    def __enter__(self) -> Any:
        self._before.append(getattr(self._shown, self._name))
        if isinstance(self.stream, Stream):
            self._shown.stream = self.stream
        elif self._name == "current" and self.stream is not None:
            self._shown.set_current(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        setattr(self._shown, self._name, self._before.pop())


def _within(name: str, of: str, shown: "Pretended") -> type:
    """Return a class of its own, as Dynamo wants it."""

    def begin(self: Any, given: Any = None) -> None:
        _Within.__init__(self, of, shown, None if isinstance(given, torch.Tensor) else given)

    return type(name, (_Within,), {"__init__": begin})


_EXEMPT = "leave it out here: it changes speed, not numbers"
# What does nothing, by the name in `torch.cuda`; what returns a constant; what has no body.
_QUIET = "init _lazy_init _lazy_call ipc_collect set_sync_debug_mode set_per_process_memory_fraction"
_SILENT = (
    "synchronize empty_cache reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached "
    "reset_accumulated_memory_stats reset_peak_host_memory_stats _record_memory_history _dump_snapshot"
)
_ZERO = (
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached "
    "utilization memory_usage temperature power_draw clock_rate device_memory_used"
)
_CLASSES = ("CUDAGraph", "MemPool", "CUDAPluggableAllocator", "graph")  # of those without a body
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
        self.stream: Any = None

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
        "set_stream": lambda stream: setattr(shown, "stream", stream),
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
        "initial_seed": lambda: torch.default_generator.initial_seed(),  # noqa: PLW0108  Dynamo knows the method
        "get_rng_state": lambda device="cuda": torch.default_generator.get_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.default_generator.set_state(new_state) and None,
        "get_rng_state_all": lambda: [torch.default_generator.get_state()] * shown.count,
        "set_rng_state_all": lambda new_states: torch.default_generator.set_state(new_states[0]) and None,
        "current_stream": lambda device=None: shown.stream or Stream(device, default=True),
        "default_stream": lambda device=None: Stream(device, default=True),
        "current_blas_handle": lambda: 0,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        **{name: _within(name, "current", shown) for name in ("device", "device_of", "_DeviceGuard")},
        **{name: _within(name, "stream", shown) for name in ("stream", "StreamContext")},
        "default_generators": (torch.default_generator,) * max(shown.count, 1),
    }
    answers |= {name: _stub(name, None, "") for name in _QUIET.split()}
    answers |= {name: _stub(name, None, "does nothing") for name in _SILENT.split()}
    answers |= {name: _stub(name, 0, "returns 0") for name in _ZERO.split()}
    answers |= {name: refusing(f"torch.cuda.{name}", fix) for name, fix in _REFUSED.items()}
    return answers | {name: type(name, (), {"__init__": answers[name]}) for name in _CLASSES}


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
    places.install(note)
    _compiler()
    after_import("torch.utils.cpp_extension", _refuse_to_build)
    _refuse_libraries()
    return shown


def _accelerator(shown: Pretended) -> None:
    core: Any = torch._C
    cuda = torch.device("cuda")
    core._accelerator_getAccelerator = core._get_accelerator = lambda *_: cuda
    core._accelerator_getDeviceIndex = lambda: shown.current
    core._accelerator_setDeviceIndex = shown.set_current
    core._accelerator_exchangeDevice = core._accelerator_maybeExchangeDevice = shown.exchange
    core._accelerator_getStream = lambda *_: torch.cuda.current_stream()
    core._accelerator_setStream = lambda *_: None
    core._accelerator_synchronizeDevice = lambda *_: None
    core._accelerator_getDeviceStats = lambda *_: {}
    core._accelerator_getMemoryInfo = lambda *_: (shown.gpu.memory_gib << 30,) * 2
    core._accelerator_emptyCache = core._accelerator_emptyHostCache = lambda *_: None
    core._accelerator_resetPeakStats = core._accelerator_resetAccumulatedStats = lambda *_: None
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
    profile: Any = torch.profiler.profile
    stock = profile.__init__

    def of_cpu(self: Any, *, activities: Any = None, **given: Any) -> None:
        """What is asked of a GPU would print the frames of an error for each event."""
        kinds = torch.profiler.ProfilerActivity
        stock(self, activities=[kinds.CPU] if activities and kinds.CUDA in activities else activities, **given)

    profile.__init__ = of_cpu
    profiler.start = profiler.stop = _stub("profiler", None, "does nothing")
    torch.cuda.nccl.version = lambda: (2, 27, 5)


def _compiler() -> None:
    """Execute what inductor would compile, as compiled cases do: no code is generated."""

    def compiled(model: Any, inputs: Any, config_patches: Any = None, **_: Any) -> Any:
        from harness.worker.virtual import device

        device.install(compiled=True)  # imports inductor
        from harness.worker.virtual.graph_backend import graph_backend

        if (config_patches or {}).get("triton.cudagraphs"):
            note("torch.compile with CUDA graphs", "runs without CUDA graphs")
        return graph_backend(model, inputs)

    after_import("torch._inductor.compile_fx", lambda module: setattr(module, "compile_fx", compiled))


def _refuse_libraries() -> None:
    """Refuse a script that loads CUDA by itself. A package that tries gets the error of its loader."""
    kind: Any = ctypes.CDLL
    stock = kind.__init__

    def load(self: Any, name: Any = None, *args: Any, **given: Any) -> None:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == ctypes.__file__:
            frame = frame.f_back
        if frame is not None and is_of_script(frame.f_code.co_filename) and _OF_CUDA.match(Path(str(name)).name):
            called = f'ctypes.CDLL("{name}")'
            ENDING.lacks(called, "raised")
            fix = "call torch.cuda instead, or catch OSError: exec has no CUDA library."
            raise NoLibrary(f"{called} needs a GPU.", where=line_of_frame(frame), fix=fix)
        stock(self, name, *args, **given)

    kind.__init__ = load


def _refuse_to_build(module: Any) -> None:
    """Refuse to build CUDA code, of `torch.utils.cpp_extension`."""
    for kind in ("load", "load_inline", "CUDAExtension"):
        setattr(module, kind, _without_cuda(f"{module.__name__}.{kind}", getattr(module, kind)))


def _without_cuda(name: str, build: Callable[..., Any]) -> Callable[..., Any]:
    """Return what builds code for a CPU, and refuses code for a GPU by its name."""
    refuse = refusing(name, "give the script an implementation in torch: no CPU runs CUDA code")

    def checked(*args: Any, **given: Any) -> Any:
        sources = str((*args[1:2], given.get("sources", ()), given.get("cuda_sources", "")))
        cuda = given.get("cuda_sources") or given.get("with_cuda") or ".cu" in sources or "CUDA" in name
        return (refuse if cuda else build)(*args, **given)

    return checked
