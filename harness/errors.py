"""The base class of errors that a user can cause and fix.

`HarnessError` says where, what and how to fix it; the command line prints it on one line and exits with 2. Internal
invariants use `assert` instead.
"""


class HarnessError(Exception):
    """Bad input, a missing file, an impossible layout.

    `where` is a file with line (`cases/pr.toml:12`), a case id or an option; `fix` says what to do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(self.text)

    @property
    def text(self) -> str:
        head = f"{self.where}: " if self.where else ""
        tail = f" Fix: {self.fix}" if self.fix else ""
        return f"{head}{self.what}{tail}"
