"""Wheels of installed packages under other versions, such as two nightlies of which one has a change."""

import base64
import hashlib
import sys
import zipfile
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

Edits = Mapping[str, tuple[str, str]]  # by file: a text in it, and what takes its place


def repacked(package: str, version: str, folder: Path, edits: Edits | None = None) -> Path:
    """A wheel with the files of the installed package, under this version."""
    installed, changed = distribution(package), dict(edits or {})
    info = f"{package}-{version}.dist-info"
    wheel = folder / f"{package}-{version}-py3-none-any.whl"
    record = []
    with zipfile.ZipFile(wheel, "w") as file:
        for path in installed.files or ():
            name = path.as_posix()
            if name.startswith("..") or path.suffix == ".pyc" or path.name in ("RECORD", "INSTALLER", "REQUESTED"):
                continue
            content = Path(str(path.locate())).read_bytes()
            if name == f"{package}-{installed.version}.dist-info/METADATA":
                content = replaced(content, f"\nVersion: {installed.version}\n", f"\nVersion: {version}\n")
            if name == f"{package}/version.py":
                content = content.replace(installed.version.encode(), version.encode())
            if name in changed:
                content = replaced(content, *changed.pop(name))
            name = name.replace(f"{package}-{installed.version}.dist-info", info)
            file.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            record.append(f"{name},sha256={digest},{len(content)}\n")
        file.writestr(f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]))
    assert not changed, f"no such files: {', '.join(changed)}"
    return wheel


def replaced(content: bytes, old: str, new: str) -> bytes:
    assert content.count(old.encode()) == 1, old
    return content.replace(old.encode(), new.encode())


SENT_TWICE: Edits = {  # the largest of all is reduced again: the same numbers, twice the calls
    "torchao/float8/float8_utils.py": (
        'amax = all_reduce(amax, "MAX", group)',
        'amax = all_reduce(all_reduce(amax, "MAX", group), "MAX", group)',
    )
}
HALF_SCALES: Edits = {  # a fault in every scale, which the replay and one rank share
    "torchao/float8/float8_utils.py": (
        "res = torch.finfo(float8_dtype).max / torch.clamp(amax, min=EPS)",
        "res = 0.5 * torch.finfo(float8_dtype).max / torch.clamp(amax, min=EPS)",
    )
}


if __name__ == "__main__":  # python -m tests.wheels PACKAGE VERSION FOLDER [SENT_TWICE|HALF_SCALES]
    name, as_version, into, *change = sys.argv[1:]
    repacked(name, as_version, Path(into), globals()[change[0]] if change else None)
