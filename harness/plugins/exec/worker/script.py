"""Runs the user's command in this process as Python would, and records how each process of it ended.

What a command is: a script, `python` with a script, a module or code, `-m MODULE`, or the Python program of a package,
such as `torchrun` and `pytest`. `run` never returns: it ends the process with the exit code of the command.
"""

import atexit
import builtins
import importlib.util
import os
import runpy
import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from harness.engine.rank import flush_streams, one_line
from harness.errors import HarnessError
from harness.plugins.exec.request import REFUSED, Absent, ProcessRecord, program_of

_exit = os._exit
_START = Path.cwd()
_FLAGS_WITH_VALUE = ("-W", "-X")
# What a program runs where it is not installed as a Python file.
_MODULES = {
    "torchrun": "torch.distributed.run",
    "pytest": "pytest",
    "accelerate": "accelerate.commands.accelerate_cli",
}
_SETS = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in _SETS})
_HOUSE = str(Path(__file__).resolve().parents[3]) + os.sep  # of the harness


def is_of_script(file: str) -> bool:
    """Return True for code that is neither Python's, an installed package's, nor the harness's."""
    path = os.path.realpath(file)
    installed = path.startswith((*_LIBRARIES, _HOUSE)) or "site-packages" in path
    return file.endswith(".py") and not installed


def shown(file: str, line: int) -> str:
    """Return a place as "train.py:41", below the folder where the command was typed where it is there."""
    path = Path(os.path.realpath(file))
    return f"{path.relative_to(_START) if path.is_relative_to(_START) else path}:{line}"


def line_of_frame(frame: types.FrameType | None) -> str:
    """Return the line of the script that the innermost call comes from; empty where none is of it."""
    while frame is not None:
        if is_of_script(frame.f_code.co_filename):
            return shown(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def line_of_error(error: BaseException) -> str:
    """Return the line of the script where an exception came from; empty where it is of none."""
    if isinstance(error, SyntaxError) and error.filename and is_of_script(error.filename):
        return shown(error.filename, error.lineno or 1)
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_of_script(frame.f_code.co_filename):
            return shown(frame.f_code.co_filename, line)
    return ""


class Ending:
    """What this process has to record at its end. A fork begins anew."""

    def __init__(self) -> None:
        self.folder = Path()
        self.ended = ""
        self.absent: dict[str, Absent] = {}
        self.joined = False  # a process group
        self.rank, self.world_size = 0, 1
        # Each fills in what it knows of this process: what trained here.
        self.contributors: list[Callable[[ProcessRecord], ProcessRecord]] = []
        self.leaves: list[Callable[[], None]] = []  # called at the end of a process that joined a group

    def restart(self) -> None:
        self.ended, self.joined = "", False
        self.rank, self.world_size = 0, 1
        self.absent.clear()

    def failed(self, error: BaseException) -> None:
        """Note the exception that ends this process, with the line of the script; the first one tells."""
        if isinstance(error, SystemExit) and (not error.code or self.ended):
            return
        text = error.text if isinstance(error, HarnessError) else one_line(error)
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            text = f"sys.exit({error.code})" if error.__context__ is None else one_line(error.__context__)
            error = error.__context__ or error
        line = line_of_error(error)
        self.ended = f"{line}: {text}" if line and not text.startswith(line) else text

    def joins(self, rank: int, size: int) -> None:
        """Note a process group: the largest that this process joins tells its rank."""
        self.joined = True
        if size > self.world_size:
            self.rank, self.world_size = rank, size

    def lacks(self, name: str, effect: str) -> None:
        """Note that the script used something of a GPU that a CPU lacks."""
        if name in self.absent:
            self.absent[name] = msgspec.structs.replace(self.absent[name], calls=self.absent[name].calls + 1)
        else:
            self.absent[name] = Absent(name=name, effect=effect, line=line_of_frame(sys._getframe(1)))

    def write(self, exit_code: int) -> None:
        """Write the record of this process, if it did anything that is to be told. Never raises: it is ending."""
        record = ProcessRecord(
            pid=os.getpid(),
            rank=self.rank if self.world_size > 1 else _number("RANK", 0),
            world_size=max(self.world_size, _number("WORLD_SIZE", 1)),
            ended=self.ended,
            exit_code=exit_code,
            absent=tuple(self.absent.values()),
        )
        with suppress(Exception):
            for contribute in self.contributors:
                record = contribute(record)
            told = self.joined or self.ended or self.absent or record.steps or record.trace is not None
            if told or record.not_watched:
                path = self.folder / f"record-{os.getpid()}.msgpack"
                path.write_bytes(msgspec.msgpack.encode(record))
        for leave in self.leaves if self.joined else ():  # then those that wait for this one end, and it is ended
            with suppress(Exception):
                leave()


ENDING = Ending()


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else otherwise


def install(folder: Path) -> None:
    """Write the record of this process and of all its forks when they exit."""
    ENDING.folder = folder
    os.register_at_fork(after_in_child=ENDING.restart)

    def exit_(status: int) -> NoReturn:
        if status and not ENDING.ended and is_of_script(sys._getframe(1).f_code.co_filename):
            ENDING.ended = f"{line_of_frame(sys._getframe(1))}: os._exit({status})"
        ENDING.write(status)
        _exit(status)

    os._exit = exit_


def end(body: Callable[[], object]) -> NoReturn:
    """Run `body` as the main program of this process, and end it as Python would: with its exit code."""
    code = 0
    try:
        body()
    except SystemExit as error:
        code = _code_of(error)
    except BaseException as error:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        ENDING.failed(error)
        if type(error) is HarnessError:  # of the command itself, which the controller tells
            (ENDING.folder / REFUSED).write_text(error.text)
        else:
            _print(error)
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads, as Python does at the end
    with suppress(BaseException):
        atexit._run_exitfuncs()
    flush_streams()
    os._exit(code)


def _code_of(error: SystemExit) -> int:
    ENDING.failed(error)
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _print(error: BaseException) -> None:
    """Print a traceback as Python would: without what started the script and stands for a GPU."""
    trace = None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not (_is_ours(frame) or frame.f_code.co_filename.startswith("<frozen ")):
            trace = types.TracebackType(trace, frame, frame.f_lasti, line)
    trace = trace or error.__traceback__  # a fault of ours
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def _is_ours(frame: types.FrameType) -> bool:
    return os.path.realpath(frame.f_code.co_filename).startswith(_HOUSE)


def main_of(command: Sequence[str]) -> Callable[[], object]:
    """Return what runs a command in this process. HarnessError for one that is not a Python program."""
    name, *words = command
    stem = Path(name).name
    if name == "-m" or name.startswith("-"):
        return main_of(["python", *command])
    if stem == "python" or (stem.startswith("python") and stem[6:].replace(".", "").isdigit()):
        return _python(words)
    if name.endswith(".py"):
        return lambda: _run_file(name, words)
    program = program_of(name)
    if stem in _MODULES and (program is None or not _is_python(program)):
        return lambda: _run_module(_MODULES[stem], words)
    if program is None:
        raise HarnessError("there is no such program.", where=name, fix="check its name, or install its package.")
    if not _is_python(program):
        fix = "give the Python program that it runs: `-- python train.py …` or `-- torchrun …`."
        raise HarnessError("it is not a Python program, so it cannot run in here.", where=name, fix=fix)
    return lambda: _run_file(program, words)


def _is_python(program: str) -> bool:
    with Path(program).open("rb") as file:
        first = file.readline(200)
        return first.startswith(b"#!") and (b"python" in first or b"exec" in file.readline(400))


def _python(words: Sequence[str]) -> Callable[[], object]:
    """Return what `python WORDS` runs: the options of Python itself are those that matter in a running one."""
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        word = rest.pop(0)
        if word in _FLAGS_WITH_VALUE and rest:
            word += rest.pop(0)
        if word.startswith("-W"):
            import warnings

            warnings.filterwarnings(word[2:].partition(":")[0] or "default")  # type: ignore[arg-type]
    if not rest or rest[0] == "-":
        raise HarnessError("it names no script.", where="python", fix="give one: `-- python train.py`.")
    first, *others = rest
    if first == "-m" or (first.startswith("-m") and len(first) > 2):
        module, *others = [first[2:], *others] if len(first) > 2 else others or [""]
        return lambda: _run_module(module, others)
    if first == "-c":
        return lambda: _run_code(others[0] if others else "", others[1:])
    return lambda: _run_file(first, others)


def _main_module(file: str | None) -> types.ModuleType:
    """Return a new `__main__`, where the classes of the script are found by their names."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    if file is not None:
        module.__file__ = file
        module.__loader__ = SourceFileLoader("__main__", file)
    sys.modules["__main__"] = module
    return module


def _run_file(file: str, words: Sequence[str]) -> None:
    path = os.path.abspath(file)  # noqa: PTH100  Python does not follow links here
    if Path(path).is_dir() or path.endswith((".zip", ".pyz")):
        sys.argv, sys.path[0] = [file, *words], path
        _main_module(None)
        runpy.run_path(path, run_name="__main__")
        return
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        fix = f"check the path: the working directory is {Path.cwd()}."
        raise HarnessError(f"there is no such script ({error.strerror}).", where=file, fix=fix) from None
    sys.argv, sys.path[0] = [file, *words], str(Path(path).resolve().parent)
    module = _main_module(path)
    _run_text(path, source, module)


def _run_text(file: str, text: bytes, module: types.ModuleType) -> None:
    from harness.worker.program import Source  # imports torch, as by now this process has

    Source(file, text).exec_module(module)


def _run_code(source: str, words: Sequence[str]) -> None:
    sys.argv, sys.path[0] = ["-c", *words], ""
    _run_text("<string>", source.encode(), _main_module(None))


def _run_module(name: str, words: Sequence[str]) -> None:
    sys.argv, sys.path[0] = ["-m", *words], str(Path.cwd())
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise HarnessError("there is no such module.", where=name, fix=f"install its package: this is {Path.cwd()}.")
    _main_module(None)
    run: Any = runpy
    run._run_module_as_main(name)
