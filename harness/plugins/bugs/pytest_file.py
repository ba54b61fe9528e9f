"""A case that fails as a test for another repository: the parts of `worker/exported.py` that it uses, and pytest."""

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from harness.durable import write_whole
from harness.plugins.bugs import export
from harness.plugins.bugs.bugfile import UNREPORTED
from harness.plugins.bugs.trials import NamedCase
from harness.result import CaseResult
from harness.running.plan import Injection
from harness.sources import installed_version

_WORKER = Path(__file__).parent / "worker"
_SCRIPT, _TEST = "harness.plugins.bugs.worker.exported", "harness.plugins.bugs.worker.exported_test"
_TESTS = {
    "gradients": "test_gradients_are_those_of_one_rank",
    "crash": "test_it_trains",
    "mismatch": "test_ranks_call_the_same_collectives",
    "scattered": "test_rows_are_scattered_along_the_sequence",
}
_ASSERTS = {
    "gradients": "Gradients must equal the gradients of one rank that gets the batches of all ranks.",
    "crash": "It must train.",
    "mismatch": "Ranks of a group must call the same collectives, of the same sizes.",
    "scattered": "The fused matmul and reduce-scatter must return the rows of a matmul, then a reduce-scatter.",
}
OLDEST = {"torch": "2.11", "torchao": "0.17"}  # with all names that the template uses
_TIMEOUT_S = 400.0
_WIDTH = 118
_ENDED = re.compile(r"^=*\s*1 (failed|passed|skipped)\b", flags=re.MULTILINE)
_RAISED = re.compile(r"^E\s+((?:\w+\.)*\w*(?:Error|Exception|Mismatch): .+)", flags=re.MULTILINE)
Color = Literal["red", "green", "cannot tell"]
Trial = tuple[str, Color, tuple[str, ...]]  # where the test runs, what it must be there, and the patches of it


class ColorSeen(NamedTuple):
    """What the test said where it was run: `when`, such as "with the fix"; what it has to be there; what it was."""

    when: str
    wanted: Color
    found: Color
    text: str


class ExportedTest(NamedTuple):
    file: Path
    lines: int
    model: str
    patches: tuple[str, ...]  # FILE.py:FUNCTION of what makes it fail
    proofs: tuple[ColorSeen, ...]

    @property
    def proven(self) -> bool:
        return all(proof.found == proof.wanted for proof in self.proofs)


def export_test(
    named: NamedCase,
    result: CaseResult,
    injections: Sequence[Injection],
    folder: Path,
    *,
    fixes: Sequence[str] = (),
    proves: bool = True,
) -> ExportedTest:
    """Write the test that fails as the case does, with the smallest model that shows it. HarnessError where none can.

    Without `proves` it is the first model. `fixes`: FILE.py:FUNCTION with which it passes.
    """
    values = export.constants(named.case, export.failure_of(result), export.failed_checks(result))
    patches = tuple(export.patch_of(injection, folder) for injection in injections)
    trials: list[Trial] = [("now", "red", ())]
    if patches:
        injected = f"with {' and '.join(injection.text for injection in injections)}"
        trials = [("as it is", "green", ()), (injected, "red", patches)]
    elif fixes:
        trials.append(("with the fix", "green", tuple(fixes)))
    file = folder / f"test_{re.sub(r'[^a-z0-9]+', '_', export.file_name(named))}.py"
    head = _head(named, result, injections, str(values["DETECT"]))
    for model, chosen in models(values):
        text = pytest_file(chosen, head=head)
        test = ExportedTest(file, len(text.splitlines()), model, patches, prove(text, trials) if proves else ())
        write_whole(file, text.encode())
        if test.proven:
            break
    return test


def _head(named: NamedCase, result: CaseResult, injections: Sequence[Injection], detects: str) -> str:
    setup, planted = export.setup_of(named.case), export.planted_title(injections)
    title = planted or export.title_of(named, result)
    versions = " and ".join(f"{package} {installed_version(package)}" for package in OLDEST)
    link = f", {named.bug.bug.link}" if named.bug is not None and named.bug.bug.link != UNREPORTED else ""
    seen = f"It passes with {versions}." if injections else f"It fails with {versions}{link}."
    about = textwrap.fill(f"{setup[0].upper()}{setup[1:]}. {_ASSERTS[detects]} {seen}", _WIDTH)
    name = textwrap.shorten(export.quoted(title), _WIDTH - 14, placeholder=" …")
    return f'"""{"A guard against: " if planted else ""}{name}.\n\n{export.quoted(about)}\n"""'


def models(values: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Constants with models that may show the same, the smallest first, and what each is called."""
    mesh = values["MESH"]
    assert isinstance(mesh, Mapping), "every template has a mesh"
    width = max(32, 16 * mesh.get("tp", 1))  # a TP rank has multiples of 16
    sizes = {"VOCAB": 2 * width, "LAYERS": 1, "HEAD_DIM": 16, "TOKENS": width}
    if values["DETECT"] != "scattered":  # by sequences
        sizes["BATCH"] = 1
    small = {**values, **sizes, **dict.fromkeys(("DIM", "KV_DIM", "FFN"), width), "COMPARE_LINEARS": False}
    yield "one small MLP", {**small, "ATTENTION": False, "LOSS_PARALLEL": False, "CHECKPOINT": "none"}
    yield "one small block", small
    yield "the model of the case", {**values, "COMPARE_LINEARS": False}
    if values["COMPARE_LINEARS"]:
        yield "the model of the case, and each of its linears", values


def pytest_file(values: Mapping[str, object], *, head: str) -> str:
    """Return the text of the file for these constants of the template. `head` is its docstring."""

    @functools.cache
    def read(module: str) -> export.Source:
        text = (_WORKER / f"{module.rpartition('.')[2]}.py").read_text()
        return export.Source(export.with_values(text, {**values, "DEVICE": "cpu"}))

    imports: set[str] = set()
    texts: dict[tuple[str, str], str] = {}
    for name in ("pytestmark", _TESTS[str(values["DETECT"])]):
        export.gather(_TEST, name, imports, texts, read)
    places = [(module, name) for module in (_SCRIPT, _TEST) for name in read(module).definitions]
    parts = {True: list[str](), False: list[str]()}  # constants, and the rest
    for place in (place for place in places if place in texts):
        parts[place[1].isupper() or place[1] == "pytestmark"].append(texts[place])
    first = "\n".join([head, "", *_imports(imports), "", *dict.fromkeys(parts[True])])
    return formatted("\n\n\n".join([first, *parts[False]]) + "\n")


def _imports(lines: set[str]) -> list[str]:
    standard = sorted(line for line in lines if not re.search(r"\b(torch|torchao|pytest)\b", line))
    others = sorted(line for line in lines if re.search(r"\b(torch|torchao)\b", line))
    skips = [f'pytest.importorskip("{package}", minversion="{version}")' for package, version in OLDEST.items()]
    return [*standard, "", "import pytest", "", *skips, "", *others]


def formatted(text: str) -> str:
    """Return the text as ruff writes it; as it is where ruff is not installed."""
    ruff = shutil.which("ruff", path=sysconfig.get_path("scripts"))
    if ruff is None:
        return text
    for words in (["check", "--quiet", "--isolated", "--select", "I,F401", "--fix"], ["format", "--isolated"]):
        command = [ruff, *words, "--line-length", "120", "--stdin-filename", "test_exported.py", "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


def prove(text: str, trials: Sequence[Trial]) -> tuple[ColorSeen, ...]:
    """Run the test under each of these patches, FILE.py:FUNCTION, until one has another color than it must have."""
    proofs: list[ColorSeen] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (when, wanted, patches) in enumerate(trials):
            split = [patch.rpartition(":") for patch in patches]
            calls = [f"runpy.run_path({str(Path(file).resolve())!r})[{name!r}]()" for file, _, name in split]
            file = Path(folder) / f"test_proof_{number}.py"
            file.write_text("\n".join([text, "import runpy", *calls, ""]))  # ranks import it too
            proofs.append(ColorSeen(when, wanted, *_color(file)))
            if proofs[-1].found != wanted:
                break
    return tuple(proofs)


def _color(file: Path) -> tuple[Color, str]:
    plain = ["-q", "-rs", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", str(file.parent)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *plain, str(file)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            cwd=file.parent,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired:
        return "cannot tell", f"it did not end within {_TIMEOUT_S:.0f} s"
    return color_of(done.stdout + done.stderr)


def color_of(output: str) -> tuple[Color, str]:
    """Return the color in the output of pytest, and what a rank raised, else how the run ended."""
    ended = _ENDED.search(output)
    raised = _RAISED.findall(output)
    last = output.strip().splitlines()[-1:] or ["it said nothing"]
    if ended is None or ended[1] == "skipped":
        return "cannot tell", "\n".join(output.strip().splitlines()[-5:])
    return ("green" if ended[1] == "passed" else "red"), raised[-1] if raised else last[0]
