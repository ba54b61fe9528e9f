"""The one exception root of the harness: what a user can cause and mend.

`HarnessError` carries who, where, what and how to fix; the command line prints it as one line and exits with 2.
Internal invariants use `assert`, never this class.
"""

from __future__ import annotations


class HarnessError(Exception):
    """A mistake in what was asked: bad input, a missing file, an impossible layout.

    `where` names the place (`cases/pr.toml:12`, a case id, an option); `fix` says what to do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(self.text)

    @property
    def text(self) -> str:
        """One line: where, what, how to fix."""
        head = f"{self.where}: " if self.where else ""
        tail = f" Fix: {self.fix}" if self.fix else ""
        return f"{head}{self.what}{tail}"
