"""Folders of `torch.distributed.checkpoint`, read without unpickling: nothing in them can run.

Their `.metadata` is a pickle, and so is the head of every tensor. `values_in` goes through the opcodes, which the
standard library names, and makes inert values of them; a class or a function is only its name.
"""

import math
import mmap
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.plugins.handoff.numbers import OF_TORCH, STORAGE
from harness.plugins.handoff.safetensors import broken
from harness.plugins.handoff.tensors import Held, Part

METADATA = ".metadata"
_MOST_METADATA = 256 << 20
_MARK = object()
_ORDERED = "collections.OrderedDict"


class Made:
    """An object that a pickle would make: of what, with which arguments, and its state."""

    def __init__(self, of: str, arguments: Any) -> None:
        self.of, self.arguments, self.state = of, arguments, None

    def field(self, name: str) -> Any:
        """Return an attribute; None where the pickle sets none."""
        return dict(self.state).get(name) if isinstance(self.state, Pairs) else None


class Pairs(list[tuple[Any, Any]]):
    """A dict, whose keys need not be hashable."""


class Stored(NamedTuple):
    """Where a chunk is: its tensor, its offsets, its file, and its bytes there."""

    name: str
    offsets: tuple[int, ...]
    file: str
    begin: int
    length: int


def values_in(content: bytes) -> Any:
    """Return what a pickle describes, as inert values. ValueError for opcodes that no checkpoint needs."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "STOP":
            return stack.pop()
        if opcode.name in _PUSHED:
            stack.append(_PUSHED[opcode.name](argument))
        elif opcode.name in _MADE:
            count, make = _MADE[opcode.name]
            stack.append(make(*_taken(stack, count)))
        elif opcode.name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if argument is None else int(argument)] = stack[-1]
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif opcode.name not in ("PROTO", "FRAME"):
            raise ValueError(f"opcode {opcode.name}")
    raise ValueError("no end")


def _taken(stack: list[Any], count: int) -> list[Any]:
    """Take so many items off a stack, or all above the last mark and `-count` below it."""
    at = len(stack) - count
    if count <= 0:
        mark = next(place for place in range(len(stack) - 1, -1, -1) if stack[place] is _MARK)
        del stack[mark]
        at = mark + count
    taken = stack[at:]
    del stack[at:]
    return taken


def _extended(some: list[Any], *items: Any) -> list[Any]:
    some.extend(zip(items[::2], items[1::2], strict=True) if isinstance(some, Pairs) else items)
    return some


def _built(made: Made, state: Any) -> Made:
    made.state = state
    return made


_VALUES = "BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT SHORT_BINUNICODE BINUNICODE SHORT_BINBYTES BINBYTES"
_PUSHED: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_VALUES.split(), lambda argument: argument),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_DICT": lambda _: Pairs(),
    "EMPTY_LIST": lambda _: [],
    "EMPTY_SET": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "MARK": lambda _: _MARK,
    "GLOBAL": lambda argument: str(argument).replace(" ", "."),
}
# How many items an opcode takes off the stack, 0: those above a mark, -1: the one below too; and what it makes of them.
_MADE: Mapping[str, tuple[int, Callable[..., Any]]] = {
    "TUPLE": (0, lambda *items: items),
    **{f"TUPLE{count}": (count, lambda *items: items) for count in (1, 2, 3)},
    "APPEND": (2, _extended),
    "SETITEM": (3, _extended),
    **dict.fromkeys(("APPENDS", "ADDITEMS", "SETITEMS"), (-1, _extended)),
    "STACK_GLOBAL": (2, lambda module, name: f"{module}.{name}"),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), (2, lambda of, given: Pairs() if of == _ORDERED else Made(str(of), given))),
    "BUILD": (2, _built),
    "BINPERSID": (1, lambda value: Made("storage", value)),
}


def read_dcp(folder: Path) -> tuple[list[Held], list[str]]:
    """Return the tensors of a checkpoint with their chunks, and the names of what is no tensor."""
    path = folder / METADATA
    if path.stat().st_size > _MOST_METADATA:
        raise broken(path, f"it has {path.stat().st_size:,} bytes, and {_MOST_METADATA:,} are the most.")
    try:
        whole = values_in(path.read_bytes())
        described, places = whole.field("state_dict_metadata"), _places(whole.field("storage_data"))
        kinds = {str(name): (_size(made.field("size")), _dtype(made)) for name, made in described if _is_tensor(made)}
    except Exception as error:  # whatever the bytes are: nothing of them ran, and none of them is believed
        what = f"it is no metadata of torch.distributed.checkpoint: {type(error).__name__} {error}."
        raise broken(path, what) from error
    not_tensors = [str(name) for name, made in described if not _is_tensor(made)]
    return [_held(folder, name, *kind, places) for name, kind in kinds.items()], not_tensors


def _is_tensor(made: Made) -> bool:
    return made.of.endswith(".TensorStorageMetadata")


def _dtype(made: Made) -> str:
    return OF_TORCH[str(made.field("properties").state[0]).removeprefix("torch.")]


def _size(value: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size, or of a tuple."""
    if isinstance(value, Made):
        value = value.arguments[0] if value.arguments else ()
    return tuple(int(each) for each in value)


def _places(storage: Any) -> dict[str, list[Stored]]:
    """Return where the chunks of each tensor are."""
    found: dict[str, list[Stored]] = {}
    for index, info in storage:
        name, offsets = str(index.field("fqn")), index.field("offset")
        place = info.field("relative_path"), int(info.field("offset")), int(info.field("length"))
        found.setdefault(name, []).append(Stored(name, () if offsets is None else _size(offsets), *place))
    return found


def _held(folder: Path, name: str, shape: tuple[int, ...], dtype: str, places: Mapping[str, list[Stored]]) -> Held:
    """Return a tensor with all its chunks. HarnessError where one is not in its file."""
    if name not in places:
        raise broken(folder / METADATA, f"tensor {name} is described and stored in no file.")
    return Held(name, dtype, shape, tuple(_part(folder, place, dtype, len(shape)) for place in places[name]))


def _part(folder: Path, place: Stored, dtype: str, dimensions: int) -> Part:
    path = folder / place.file
    if Path(place.file).name != place.file or not path.is_file():
        raise broken(folder / METADATA, f"tensor {place.name} is in {place.file}, which is not in the folder.")
    end = place.begin + place.length
    if end > path.stat().st_size:
        what = f"tensor {place.name} ends at byte {end:,}, and the file has {path.stat().st_size:,}"
        raise broken(path, f"it is truncated: {what}.")
    try:
        at, shape = _data_of(path, place)
        data = np.memmap(path, mode="r", dtype=STORAGE[dtype], offset=at, shape=shape) if math.prod(shape) else None
        raw = np.zeros(shape, STORAGE[dtype]) if data is None else data
    except Exception as error:  # as above
        what = f"tensor {place.name} at byte {place.begin:,} is not as torch.save writes it"
        raise broken(path, f"{what}: {type(error).__name__} {error}.") from error
    return Part(place.offsets or (0,) * dimensions, raw, f"{path} at byte {at}")


def _data_of(path: Path, place: Stored) -> tuple[int, tuple[int, ...]]:
    """Return at which byte of the file the numbers of a chunk begin, and its shape. ValueError for others."""
    skipped = place.begin % mmap.ALLOCATIONGRANULARITY
    start, length = place.begin - skipped, skipped + place.length
    with path.open("rb") as file, mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start) as chunk:
        archive: Any = chunk  # which has what is called of it
        infos = {info.filename.partition("/")[2]: info for info in zipfile.ZipFile(archive).infolist()}
        at = _begin(chunk, infos["data.pkl"])
        made = values_in(chunk[at : at + infos["data.pkl"].file_size])
        if not made.of.startswith("torch._utils._rebuild_tensor_v"):
            raise ValueError(made.of)
        storage, first, size, stride = made.arguments[:4]
        shape = _size(size)
        steps = tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))
        if first or (math.prod(shape) and _steps(shape, _size(stride)) != _steps(shape, steps)):
            raise ValueError("it is no contiguous tensor")
        return start + _begin(chunk, infos[f"data/{storage.arguments[2]}"]), shape


def _steps(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    return [stride for count, stride in zip(shape, strides, strict=True) if count > 1]


def _begin(chunk: mmap.mmap, info: zipfile.ZipInfo) -> int:
    """Return at which byte of a chunk the content of a file in its archive begins."""
    if info.compress_type:
        raise ValueError("it is compressed")
    lengths = chunk[info.header_offset + 26 : info.header_offset + 30]
    return info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
