"""The private parts of torch and torchao that ranks use: each declared once, in `internals.toml`.

`worker/process/internals.py` checks them inside of a rank; `tests/house/test_internals.py` holds them against the
source.
"""

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from harness.registry import plugins

RUN = "run"  # the part that every run needs


class Use(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a name is used, and what else must hold for it.

    `since`: the release that brought it, as "torch 2.15": without it nothing is missing in an older one.
    """

    why: str
    since: str = ""
    set: bool = False  # ranks assign it on an object
    patched: bool = False  # ranks put something of theirs in its place, in its class or module
    takes: tuple[str, ...] = ()  # parameters that it must have


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one thing that ranks do needs of torch and torchao, by dotted name.

    `files`: those of `worker/` that use these names; a folder ends in "/". A part of a plug-in has its whole `worker/`.
    `needs`: parts whose files these import.
    """

    uses: Mapping[str, str | Use]
    without: str = ""  # what is lost where a name is not as declared; empty: what those that need it have
    files: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    record: str = ""  # the field of `RankTrace` that is not recorded then
    preloaded: bool = False  # ranks are forked from a process that has imported the files

    def use(self, name: str) -> Use:
        use = self.uses[name]
        return Use(why=use) if isinstance(use, str) else use

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(f"harness.worker.{file.removesuffix('.py').replace('/', '.')}" for file in self.files)


@functools.cache
def read_parts() -> Mapping[str, Part]:
    """Return every part by its name, the one that every run needs first, and those of plug-ins last."""
    folders = (Path(__file__).parent, *(plugin.folder for plugin in plugins() if plugin.folder is not None))
    parts: dict[str, Part] = {}
    for path in (folder / "internals.toml" for folder in folders):
        if path.is_file():
            declared = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), dict[str, Part])
            whole = () if path.parent == folders[0] else (f"plugins/{path.parent.name}/worker/",)
            parts |= {name: msgspec.structs.replace(part, files=part.files or whole) for name, part in declared.items()}
    return parts


def with_needed(name: str) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for needed in read_parts()[name].needs:
        names |= dict.fromkeys(with_needed(needed))
    return (*names, name)


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the private parts are in one environment: its versions, and what is not as declared, part by part."""

    versions: Mapping[str, str]  # torch, torchao
    gaps: Mapping[str, Mapping[str, str]]  # by part and name: "is gone", "is read-only", "no longer takes x"
    milliseconds: float  # that the check of what every run checks took
