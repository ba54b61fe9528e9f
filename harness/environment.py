"""The environment of a run: everything besides the cases that its numbers depend on, and when two are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run was made with, as `running/identity.py` finds it. Names no user, host or path."""

    packages: Mapping[str, str] = {}  # versions of fp8-harness, torch, torchao, numpy, …; python
    contents: Mapping[str, str] = {}  # digests of the sources of packages that are installed from a checkout
    targets: Mapping[str, str] = {}  # digests of the sources of the user's own targets
    injected: tuple[str, ...] = ()  # what --inject calls in every rank, each with a digest of its file
    device: str = ""  # "cpu" or the name of the GPU
    architecture: str = ""  # of the GPU: "sm90"
    driver: str = ""  # of the GPU
    cpu: str = ""  # model and extensions
    threads: int = 0  # that this process may use
    limits: str = ""  # environment variables that limit the arithmetic of a CPU
    platform: str = ""  # "Linux x86_64"
    engine: str = ""
    fabric: str = ""  # what collectives ran on: "shared", "gloo" or "nccl"
    arithmetic: str = ""  # "kernel" or "exact" where it is not the usual one of the device
    program: str = ""  # of the ranks
    commit: str = ""  # of the project with the cases; ends in "-dirty" where tracked files differ from it
    changes: str = ""  # digest of these differences
    upstream: tuple[str, ...] | None = None  # changes of torch by name that its packages have; None: it does not say

    @property
    def fingerprint(self) -> str:
        """Equal where every field is: numbers of a CPU must then be equal too."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]

    @property
    def short_commit(self) -> str:
        """The first characters of the commit, with "+" where tracked files differ from it; empty without git."""
        commit, dirty, _ = self.commit.partition("-dirty")
        return "" if commit == "unknown" else f"{commit[:9]}{'+' if dirty else ''}"

    def differences(self, other: Environment) -> tuple[str, ...]:
        """What differs, each as "torch 2.12.0 -> 2.13.0"; empty where nothing does."""
        mine, others = self.words, other.words
        return changed_facts(mine, others, dict.fromkeys((*mine, *others)))

    @property
    def words(self) -> Mapping[str, str]:
        """Every fact under one name: packages by theirs, sources as "torchao sources". `upstream` follows from them."""
        facts = {name: str(getattr(self, name)) for name in self.__struct_fields__ if name not in _SEVERAL}
        sources = {f"{name} sources": digest for name, digest in (*self.contents.items(), *self.targets.items())}
        injected = {"injected": "; ".join(self.injected)}
        named = {**self.packages, **sources, **facts, **injected}
        return {name: value for name, value in named.items() if value not in ("", "0")}


def changed_facts(before: Mapping[str, str], now: Mapping[str, str], names: Iterable[str]) -> tuple[str, ...]:
    """What differs of the named facts, each as "torch 2.12.0 -> 2.13.0"; "none" for what is not there."""
    return tuple(
        f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
        for name in names
        if before.get(name) != now.get(name)
    )


_SEVERAL = ("packages", "contents", "targets", "injected", "upstream")
