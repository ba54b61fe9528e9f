"""Injections: a user's function that every rank calls before the target is built, to try a patch on the whole matrix.

Owns the form `FILE.py:FUNCTION`, and knows the prefixes of plug-ins, as in `fault:NAME` of a planted fault. Checks
them without running anything: a file is parsed, never imported here.
"""

import ast
import contextlib
import hashlib
from pathlib import Path

import msgspec

from harness.errors import HarnessError
from harness.registry import injections, is_offered, load, needed
from harness.trace.record import Patch

_FORM_FIX = "write --inject FILE.py:FUNCTION or fault:NAME."


class Injection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to call in every rank. `text` is what the user wrote; in `target` paths are absolute.

    `source` is the content of the file when the command started, which is what ranks run.
    """

    text: str
    target: str
    source: bytes = b""

    @property
    def patch(self) -> Patch:
        return Patch(text=self.target, source=self.source)

    @property
    def text_with_absolute_path(self) -> str:
        """`text` with an absolute path."""
        return self.target

    @property
    def content(self) -> str:
        """Its name and the digest of its file: injections with equal content do the same."""
        if not self.source:  # of a plug-in
            return self.text
        return f"{self.text} {hashlib.sha256(self.source).hexdigest()[:16]}"


def parse_injection(text: str, *, folder: Path | None = None) -> Injection:
    """The injection that `text` names; HarnessError when the form, the file, the function or the fault is wrong.

    A relative file is looked for in `folder`, by default the current one.
    """
    where = f"--inject {text}"
    prefix, separator, name = text.partition(":")
    prefix += separator
    if prefix in injections():
        load(injections()[prefix].check)(name)
        return Injection(text=text, target=text)
    if is_offered(prefix):
        raise needed(prefix, where=where)
    file_name, colon, function = text.rpartition(":")
    if not colon or not file_name.endswith(".py") or not function.isidentifier():
        raise HarnessError("this is not FILE.py:FUNCTION.", where=where, fix=_form_fix(text))
    file = (folder or Path()).joinpath(file_name).resolve()
    source = _read(file, where=where)
    names = _top_level_names(file, source, where=where)
    if function not in names:
        offered = ", ".join(sorted(names)) or "nothing"
        raise HarnessError(f"{file_name} defines no {function}.", where=where, fix=f"it defines {offered}.")
    return Injection(text=text, target=f"{file}:{function}", source=source)


def _form_fix(text: str) -> str:
    """The prefix that is missing in front of a name that a plug-in knows, or the forms that there are."""
    for prefix, kind in injections().items():
        with contextlib.suppress(HarnessError):
            load(kind.check)(text)
            return f"write --inject {prefix}{text}."
    return _FORM_FIX


def _read(file: Path, *, where: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise HarnessError(f"cannot read {file}: {error.strerror}.", where=where, fix=_FORM_FIX) from error


def _top_level_names(file: Path, source: bytes, *, where: str) -> frozenset[str]:
    """Names that the module binds at its top level and that may be functions: defs and assignments."""
    try:
        module = ast.parse(source, filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise HarnessError(f"{file}:{line}: {error}.", where=where, fix="correct the file.") from error
    return frozenset(name for statement in module.body for name in _bound_names(statement))


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    return []
