"""Documents that are walked by tests: their commands and files, in order."""

import re
from collections.abc import Iterator

_BLOCK = re.compile(r"^```(sh|python|diff)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)


def steps(document: str) -> Iterator[tuple[str, str]]:
    """("sh", a command), ("python", a file) and ("diff", a change of the last file), in the order of the document."""
    for kind, block in _BLOCK.findall(document):
        yield from ((kind, line) for line in block.splitlines()) if kind == "sh" else [(kind, block)]


def changed(text: str, diff: str) -> str:
    """A file after a change: the lines with - become those with +."""
    old, new = ("".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] == sign) for sign in "-+")
    assert text.count(old) == 1, f"not in the file: {old}"
    return text.replace(old, new)
