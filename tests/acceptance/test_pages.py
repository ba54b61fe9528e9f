"""The pages of the site: every command in them is run, or at least understood, and the site has no broken link.

The page for whoever describes a case is short and true, and every example explains itself.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from harness.checks.metamorphic import MEMORY
from harness.checks.scales import RULES
from harness.matrix.axes import AXES, DEFAULTS, checked_value, choices
from harness.matrix.casefile import parse_case_file
from harness.matrix.caseid import case_id
from harness.matrix.model import MODEL_PRESETS
from harness.matrix.rules import exclusions
from harness.verdict import Verdict
from tests.acceptance.conftest import CASES, REPOSITORY, Command
from tests.acceptance.documents import changed, steps
from tests.builders import sentence
from tests.commands import understood
from tests.fork_servers import ForkServers

DOCS, README = REPOSITORY / "docs", (REPOSITORY / "README.md").read_text()
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("plugins/*.md")])
# Pages whose commands have a test of their own.
WALKED = {
    "plugins/gpu.md",
    "plugins/handoff.md",
    "index.md",
    "your-own-trainer.md",
    "plugins/bugs.md",
    "reading-a-report.md",
}
HERE = ("concepts.md", "tolerances.md", "ci.md", "versions.md", "plugins/release.md", "plugins/predict.md")
# Commands that need a cluster, a container or real ranks: understood, and run by tests of their own.
ELSEWHERE = (
    "exec.md",
    "platforms.md",
    "on-a-cluster.md",
    "plugins/parity.md",
    "plugins/independence.md",
    "for-torchtitan.md",
    "for-torchao.md",
)
BY_NIGHT = ("index.md", "your-own-trainer.md", "plugins/bugs.md")  # walked by tests with the mark `sweep`

# Commands that are understood only, and why they are not run here.
NOT_RUN = {
    "fp8-harness baseline tolerance --measure pr --seeds 8": "takes minutes",
    "fp8-harness compare --versions torchao=0.17.0,0.18.0 pr": "makes environments from a package index",
    "fp8-harness compare --versions torch=2.13.0,2.15.0 pr": "makes environments from a package index",
    "fp8-harness compare --versions torch=2.13.0,mine --env mine=.venv-mine pr": "needs an environment",
    'fp8-harness baseline update --only-failing --reason "torch 2.14 changed AdamW"': "run where a loss is off",
    "fp8-harness baseline show --against HEAD": "run in a git repository",
}


def commands(page: str) -> list[str]:
    return [text for kind, text in steps((DOCS / page).read_text()) if kind == "sh"]


@pytest.mark.parametrize("page", HERE)
def test_the_commands_of_a_page_work(project: Command, page: str) -> None:
    project.tier("pr", CASES)
    shutil.copytree(REPOSITORY / "golden" / "evidence", project.folder / "golden" / "evidence", dirs_exist_ok=True)
    shutil.copy(REPOSITORY / "golden" / "tolerances.toml", project.folder / "golden")
    # Its ranks compute nothing, so the golden of the package is not theirs.
    project.call("baseline", "update", "tp2-rowwise-v2048-s2-b16", "--device", "cpu", "--reason", "of the page")
    for text in commands(page):
        if text.startswith("fp8-harness"):
            understood(text)
        if text in NOT_RUN:
            continue
        done = project.printed(f"{text} -p no:cacheprovider" if text.startswith("pytest") else text)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"


def test_the_readme_shows_a_failure_as_it_is_printed(tmp_path: Path, warm: ForkServers) -> None:
    """With torch: where this fails, put into README.md what it prints."""
    (block,) = re.findall(r"^```\n\$ (fp8-harness .*?)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    text, shown = block
    assert text in commands("index.md"), "the first page has the same command"
    done = Command(tmp_path, {"FP8_HARNESS_PROGRAM": ""}, fork_servers=warm).printed(text)
    assert done.returncode == 1 and " ".join(shown.split()) in " ".join(done.stdout.split()), done.stdout


@pytest.mark.parametrize("page", (*ELSEWHERE, *BY_NIGHT))
def test_the_commands_of_a_page_are_understood(page: str) -> None:
    texts = [text for text in commands(page) if text.startswith("fp8-harness")]
    assert texts
    for text in texts:
        understood(text)


def test_every_page_with_commands_has_a_test() -> None:
    pages = {str(path.relative_to(DOCS)) for path in PAGES}
    assert {name for name in pages if commands(name)} == WALKED | set(HERE) | set(ELSEWHERE)
    assert {text for page in HERE for text in commands(page)} >= set(NOT_RUN), "no page has this command any more"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_in_a_line_are_understood(path: Path) -> None:
    """Those between backticks that have an option; words in capitals stand for something."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for text in re.findall(r"`(fp8-harness [^`]+)`", prose):
        if re.search(r" --\w", text) and "…" not in text:
            understood(text)


def test_the_site_has_no_broken_link_and_no_page_outside_of_it(tmp_path: Path) -> None:
    site = ["--config-file", str(REPOSITORY / "mkdocs.yml"), "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", *site],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = [path.read_text() for path in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > 8
    assert not [url for page in pages for url in re.findall(r'(?:src|href)="(https?://[^"]*\.(?:js|css))', page)]


def test_make_docs_renders_the_site() -> None:
    done = subprocess.run(
        ["make", "-n", "docs"], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert "mkdocs build --strict" in done.stdout
    assert yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["docs_dir"] == "docs"


# What a command says, every time that it stands in the page: exit code and words. Others only have to work.
Says = Mapping[str, list[tuple[int, str]]]
Run = Callable[[Path, str], "subprocess.CompletedProcess[str]"]
PASSED = (0, "1 case: 1 passed")
WRONG_SCALE = f"{RULES.amax.name} in layers.0.attention.wq: {RULES.amax.says}: first for input in forward at step 1"


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text()


def walk(document: str, here: Path, says: Says, run: Run, *, file: str = "") -> None:
    """Follow a page from a folder: its files, changes of the last file or of `file`, and commands."""
    path, left = here / file, {text: list(answers) for text, answers in says.items()}
    for kind, text in steps(document):
        if kind == "python":
            path = here / text.splitlines()[0].removeprefix("# ")
            path.write_text(text)
        elif kind == "diff":
            path.write_text(changed(path.read_text(), text))
        elif text.startswith("cd "):
            here = (here / text.removeprefix("cd ")).resolve()
            path = here / file if file else path
        elif text.startswith("make "):
            subprocess.run(["make", "-n", *text.split()[1:]], cwd=REPOSITORY, check=True, capture_output=True)
        elif text.startswith(". "):
            assert f"VENV := {text.split()[1].partition('/')[0]}\n" in (REPOSITORY / "Makefile").read_text()
        else:
            code, words = left[text].pop(0) if left.get(text) else (0, "")
            done = run(here, text)
            assert done.returncode == code, f"{text}\n{done.stdout}{done.stderr}"
            assert words in done.stdout, f"{text}\n{done.stdout}"
    assert not any(left.values()), "the page lost a command"


def with_examples(folder: Path) -> Run:
    """How commands are run in a folder that has the examples and a state of its own."""
    shutil.copytree(REPOSITORY / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    state = {"FP8_HARNESS_STATE": str(folder / "state")}
    return lambda here, text: Command(here, state).shell(text, timeout_s=600)


@pytest.mark.sweep  # seven runs with ranks
def test_start(tmp_path: Path) -> None:
    injected = next(text for text in commands("index.md") if "--inject fault:" in text)
    says = {
        "fp8-harness run smoke": [(0, "8 cases: 8 passed")],
        injected: [(1, "not reduced over dp_shard")],
        "fp8-harness run my.toml": [PASSED],
        "fp8-harness run my.toml --inject wrong_scale.py:apply": [(1, WRONG_SCALE)],
        "fp8-harness run --lf": [(1, WRONG_SCALE)],
        "fp8-harness run my": [PASSED],
    }
    walk(page("index.md"), tmp_path, says, lambda here, text: Command(here).shell(text, timeout_s=600))


@pytest.mark.sweep  # thirteen commands, ten of them with ranks
def test_your_own_trainer(tmp_path: Path) -> None:
    shell = with_examples(tmp_path)

    def run(here: Path, text: str) -> subprocess.CompletedProcess[str]:
        done = shell(here, text)
        assert "cannot be judged" not in done.stdout
        return done

    layouts = (
        "fp8-harness parity --target my_target --layouts single,fsdp2,tp2 --recipe tensorwise --dtype float64 --steps 3"
    )
    kept = sentence(MEMORY, what="float8_e4m3fn bytes saved for backward")
    says = {
        "fp8-harness run --inject fault:amax_without_abs": [(1, f"{RULES.amax.name} in 1: {RULES.amax.says}")],
        "fp8-harness run --inject fault:float8_weight_kept_for_backward": [(1, kept)],
        "fp8-harness check-target my_target": [(0, "my_target works under the harness. Not supported by it:")],
        layouts: [(1, "fsdp2   wrong"), (0, "fsdp2   equal")],
        "fp8-harness run": [*[PASSED] * 2, (0, "5 cases: 5 passed")],
    }
    walk(page("your-own-trainer.md"), tmp_path, says, run)


@pytest.mark.sweep
def test_from_report_to_case(tmp_path: Path) -> None:
    live = "fsdp2-tp2-tensorwise-ag.fp8-ac.full-v2048-s2-f64"
    add = "fp8-harness bug import ../examples/report.md"
    shrink = f"fp8-harness bug shrink {live} --json shrunk.json --output small.toml"
    listed = "fsdp2-tp2-rowwise-ac.full-graph-kvheads.4-v2048-gb4-s12-b16"
    says = {
        add: [(0, "wrote cases/bugs/your-model-7.toml")],
        f"{add} --date 2026-05-01 --dry-run": [(0, 'title = "float8 loss is NaN with TP and FSDP2"')],
        f"{add} --id full-size --full-size": [(0, "dim = 4096")],
        "fp8-harness bug list": [(0, "2 bugs: 2 open")],
        "fp8-harness bug repro your-model-7": [(0, "not reproduced: fsdp2-tp2-rowwise-ac.full-graph")],
        f"fp8-harness bug repro {live}": [(1, f"{RULES.amax.name} in layers")],
        shrink: [(0, "smallest case: fsdp2-tp2")],
        "fp8-harness list cases/bugs/your-model-7.toml": [(0, listed)],
    }
    run = with_examples(tmp_path)
    walk(page("plugins/bugs.md"), tmp_path, says, run, file="cases/bugs/your-model-7.toml")


def test_reading_a_report(project: Command) -> None:
    document = page("reading-a-report.md")
    says = {
        "fp8-harness show": [(0, "4 cases: 4 passed")],
        "fp8-harness show single-tensorwise": [(0, "passed; 1 rank")],
        "fp8-harness show first single-tensorwise": [(0, "passed; 1 rank")],
    }
    walk(document, project.folder, says, lambda _, text: project.printed(text))
    assert all((project.folder / name).stat().st_size for name in ("report.html", "summary.md", "junit.xml"))
    script = (REPOSITORY / "harness" / "report" / "html" / "assets" / "page.js").read_text()
    rows = re.findall(r"^\| (\S) \| (\w+) \| (.+) \|$", document, flags=re.MULTILINE)
    assert {name: phrase for _, name, phrase in rows} == {verdict.value: verdict.phrase for verdict in Verdict}
    assert all(f'{name}: "{mark}"' in script for mark, name, _ in rows), "the marks are those of the page"


PAGE = (REPOSITORY / "docs" / "describe-a-case.md").read_text()
EXAMPLES = re.findall(r"^```toml\n(.*?)^```", PAGE.partition("## Examples")[2], flags=re.MULTILINE | re.DOTALL)
ROWS = re.findall(r"^\| (`\w.*?) \| (.*) \| (.*) \|$", PAGE, flags=re.MULTILINE)
# Left to `new --schema`: they change how a run is done or checked, and no description of a job has them.
NOT_ON_THE_PAGE = {"target", "model", "symm_mem", "wait_for_embedding", "reduce_grads", "seed", "loss_tolerance"}


def test_it_is_short_and_has_examples() -> None:
    assert len(EXAMPLES) > 5 and len(PAGE.split()) <= 900


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_is_a_case_that_explains_itself(shared: Command, text: str) -> None:
    (case,) = parse_case_file(text, where="page").cases
    assert case.world_size <= 8 and not exclusions(case)
    done = shared.call("explain", case_id(case))
    assert done.returncode == 0 and done.stdout.startswith(case_id(case)), done.stderr


def test_the_table_has_the_keys_their_values_and_defaults() -> None:
    names = [name for keys, _, _ in ROWS for name in re.findall(r"`(\w+)`", keys)]
    assert {*names} == AXES.keys() - NOT_ON_THE_PAGE and len(names) == len(set(names))
    for keys, values, defaults in ROWS:
        named, words = re.findall(r"`(\w+)`", keys), {*re.findall(r"\w+", values)}
        for name in named:
            if len(named) == 1 or choices(name) == (True, False):
                assert {str(choice).lower() for choice in choices(name)} <= words, name
        shown = defaults.split(", ")
        for name, default in zip(named, shown if len(shown) > 1 else shown * len(named), strict=True):
            real = getattr(MODEL_PRESETS["tiny"], name, DEFAULTS[name])
            assert default == "none" if real in (None, ()) else checked_value(name, _typed(default)) == real, name


def _typed(text: str) -> object:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return float(text) if re.fullmatch(r"[\d.]+", text) else text
