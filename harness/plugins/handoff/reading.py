"""States in files: a safetensors file, a folder of them, a DCP checkpoint; and the parts of ranks put together.

A dict of tensors, and functions on ranks, are read in `worker/`.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import HarnessError
from harness.plugins.handoff.dcp import METADATA, read_dcp
from harness.plugins.handoff.safetensors import broken, read_file, read_json_file
from harness.plugins.handoff.tensors import Held, Part, State, bits_of

INDEX = ".safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_RANK = re.compile(r"(?:^|[-_.])rank[-_]?(\d+)(?=[-_.])")
_KINDS = "give a .safetensors file, a folder of them, or one of torch.distributed.checkpoint."


def read_state(path: Path) -> State:
    """Return what is in a file or folder. HarnessError for what is missing, damaged, or would run code."""
    if not path.exists():
        raise HarnessError("there is no such file or folder.", where=str(path), fix=_KINDS)
    if path.is_file():
        if path.suffix in _PICKLES:
            raise HarnessError("it is a pickle, which may run code when it is read.", where=str(path), fix=_KINDS)
        if path.name.endswith(INDEX):
            return _state(path.parent, _indexed(path))
        return _state(path, read_file(path), beside=path.parent)
    if (path / METADATA).is_file():
        tensors, others = read_dcp(path)
        return _state(path, tensors)._replace(not_tensors=tuple(others))
    return _folder(path)


def _folder(folder: Path) -> State:
    """Return the tensors of a folder of safetensors files: by its index, by rank, or all of them."""
    indexes, files = sorted(folder.glob(f"*{INDEX}")), sorted(folder.glob("*.safetensors"))
    if len(indexes) > 1:
        fix = "give one of them instead of the folder."
        raise HarnessError(
            f"it has {len(indexes)} indexes: {indexes[0].name}, {indexes[1].name}.", where=str(folder), fix=fix
        )
    if indexes:
        return _state(folder, _indexed(indexes[0]))
    if not files:
        raise HarnessError("no safetensors file and no .metadata is in it.", where=str(folder), fix=_KINDS)
    of_ranks: dict[int, list[Held]] = {}
    for file in files:
        rank = _RANK.search(file.name)
        of_ranks.setdefault(int(rank[1]) if rank else -1, []).extend(read_file(file))
    if -1 in of_ranks:
        return _state(folder, _once(held for tensors in of_ranks.values() for held in tensors))
    ranks = [_once(of_ranks[rank]) for rank in sorted(of_ranks)]
    return _state(folder, gathered([{held.name: held for held in tensors} for tensors in ranks]))


def _state(path: Path, tensors: Iterable[Held], *, beside: Path | None = None) -> State:
    folder, config = beside or path, dict[str, Any]()
    for name in ("hf_quant_config.json", "config.json"):
        if (folder / name).is_file():
            config |= read_json_file(folder / name)
    return State(str(path), {held.name: held for held in tensors}, config)


def _indexed(path: Path) -> list[Held]:
    """Return the tensors that an index names, each from its file. HarnessError where these disagree."""
    named = read_json_file(path).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise broken(path, "it has no weight_map of tensors to files.")
    found: dict[str, Held] = {}
    for file in dict.fromkeys(named.values()):
        first, *rest = (name for name, of in named.items() if of == file)
        if Path(file).name != file or not (path.parent / file).is_file():
            raise broken(path, f"shard {file} is not in the folder; it has {first} and {len(rest)} more.")
        held = {each.name: each for each in read_file(path.parent / file)}
        for name in (name for name, of in named.items() if of == file and name not in held):
            raise broken(path, f"tensor {name} is not in {file}, where the index says it is.")
        for name in held:
            if named.get(name) != file:
                says = f"names it in {named[name]}" if name in named else "does not name it"
                raise broken(path, f"tensor {name} is in {file}, and the index {says}.")
        found |= held
    return list(found.values())


def _once(tensors: Iterable[Held]) -> list[Held]:
    """Return tensors by name, the parts that several files hold together. HarnessError for one that is there twice."""
    found: dict[str, Held] = {}
    for held in tensors:
        before = found.get(held.name)
        if before is not None and any(part.offsets == held.parts[0].offsets for part in before.parts):
            what = f"tensor {held.name} is in it twice: {before.where}, {held.where}."
            raise HarnessError(what, where=before.where.partition(" at byte")[0], fix="remove one of the files.")
        parts = (*(before.parts if before else ()), *held.parts)
        found[held.name] = _assembled(held, parts)
    return list(found.values())


def _assembled(held: Held, parts: tuple[Part, ...]) -> Held:
    """Return the tensor that parts with offsets make up."""
    shape = tuple(max(part.offsets[at] + part.raw.shape[at] for part in parts) for at in range(len(parts[0].raw.shape)))
    return held._replace(shape=shape, parts=parts)


def gathered(ranks: Sequence[Mapping[str, Held]], whole: Mapping[str, tuple[int, ...]] = {}) -> list[Held]:
    """Return the tensors of all ranks put together.

    A shard knows its offsets, where it was a DTensor. Of plain tensors that differ, `whole` says the shape that they
    must have; without it those whose bits are equal are replicas, and others follow one another in their first
    dimension that differs, or in the first.
    """
    found = []
    for name in dict.fromkeys(name for tensors in ranks for name in tensors):
        own = [(rank, tensors[name]) for rank, tensors in enumerate(ranks) if name in tensors]
        parts = tuple(
            part._replace(rank=rank, where=part.where or f"rank {rank}") for rank, held in own for part in held.parts
        )
        sharded = any(part.raw.shape != held.shape for _, held in own for part in held.parts)
        whole_of = own[0][1]._replace(parts=parts)
        found.append(whole_of if sharded else _plain(whole_of, [held.shape for _, held in own], whole.get(name)))
    return found


def _plain(held: Held, shapes: Sequence[tuple[int, ...]], whole: tuple[int, ...] | None) -> Held:
    """Return plain tensors of ranks as one: replicas, or shards that follow one another along one dimension."""
    dimensions = range(len(shapes[0]))
    along = next((at for at in dimensions if whole and _joined(shapes, at) == whole != shapes[0]), None)
    if whole == shapes[0] or not shapes[0] or len({*map(len, shapes)}) > 1 or (along is None and _equal(held.parts)):
        return held
    if along is None:
        along = next((at for at in dimensions if len({each[at] for each in shapes}) > 1), 0)
    moved, at = list[Part](), 0
    for part in held.parts:
        moved.append(part._replace(offsets=tuple(at if each == along else 0 for each in dimensions)))
        at += part.raw.shape[along]
    return _assembled(held, tuple(moved))


def _joined(shapes: Sequence[tuple[int, ...]], at: int) -> tuple[int, ...]:
    """Return the shape of tensors that follow one another along a dimension."""
    return (*shapes[0][:at], sum(each[at] for each in shapes), *shapes[0][at + 1 :])


def _equal(parts: Sequence[Part]) -> bool:
    first = parts[0].raw
    return all(
        part.raw.shape == first.shape and np.array_equal(bits_of(part.raw), bits_of(first)) for part in parts[1:]
    )


def read_words(path: Path) -> Any:
    """Return a file of JSON, whatever is in it. HarnessError where it is none."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise HarnessError(f"it is no file of JSON: {error}.", where=str(path), fix="check the path.") from error
