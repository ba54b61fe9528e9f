"""Makes the pictures of the pages from real runs: `python ci/pictures.py`, with Chromium (`make browser`).

`docs/images/pictures.json` keeps the command of each picture, the headings that it shows, and its digest, so a test
notices when the command or the layout is gone.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from harness.durable import write_whole

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
RECORD = IMAGES / "pictures.json"
CHROMIUM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FAULT = "fault:weight_amax_not_reduced_over_shards"
RUN = f"fp8-harness run smoke --inject {FAULT} --html page.html"
PARITY = (
    "fp8-harness parity --recipe tensorwise --steps 2 --layouts single,fsdp2,tp2 "
    "--inject fault:amax_not_reduced_over_tp --markdown comment.md"
)
CASE = "fsdp2-tensorwise-ag.fp8-v2048-f64"
STYLE = """
body { font: 14px/1.5 sans-serif; color: #1f2328; margin: 16px; border: 1px solid #d1d9e0; border-radius: 6px }
header { background: #f6f8fa; padding: 8px 16px; border-bottom: 1px solid #d1d9e0 }
main { padding: 0 16px } table { border-collapse: collapse } th, td { border: 1px solid #d1d9e0; padding: 4px 10px }
code { background: #eff1f3; padding: 2px 4px; border-radius: 4px }
"""


class Picture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a picture was made by, the headings that it shows, and the digest of its file."""

    command: str
    headings: tuple[str, ...]
    sha256: str


def read() -> Mapping[str, Picture]:
    return msgspec.json.decode(RECORD.read_bytes(), type=dict[str, Picture])


def ran(command: str, folder: Path) -> None:
    """Run a command, which may find what is injected."""
    words = [sys.executable, "-m", "harness", *shlex.split(command)[1:]]
    env = {**os.environ, "FP8_HARNESS_STATE": str(folder / "state")}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr


def picture(page: Page, name: str, command: str, *, height: int | None = None) -> Picture:
    """Write a picture of what a page shows, of its top where there is a height."""
    file = IMAGES / name
    width = page.viewport_size["width"] if page.viewport_size else 1280
    clip = {"x": 0, "y": 0, "width": width, "height": height} if height else None
    page.screenshot(path=file, full_page=True, clip=clip)  # type: ignore[arg-type]
    shown = page.locator("h1:visible, h2:visible, h3:visible, nav a:visible").all_inner_texts()
    headings = tuple(dict.fromkeys(text.strip() for text in shown if text.strip()))
    return Picture(command=command, headings=headings, sha256=digest(file))


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def comment(text: str) -> str:
    """Return a page with Markdown as a pull request shows it."""
    import markdown

    body = markdown.markdown(text, extensions=["tables", "sane_lists"])
    head = f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>"
    return f"{head}<header><b>github-actions</b> bot commented</header><main>{body}</main>"


def main() -> None:
    from playwright.sync_api import sync_playwright

    path = next(found for name in CHROMIUM if (found := shutil.which(name)))
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        ran(RUN, folder)
        ran(PARITY, folder)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto((folder / "page.html").as_uri())
        pictures = {"report.png": picture(page, "report.png", RUN, height=800)}
        page.get_by_role("link", name=CASE).first.click()
        pictures["case.png"] = picture(page, "case.png", RUN, height=1400)
        (folder / "comment.html").write_text(comment((folder / "comment.md").read_text()))
        page.goto((folder / "comment.html").as_uri())
        pictures["comment.png"] = picture(page, "comment.png", PARITY, height=640)
        browser.close()
    write_whole(RECORD, msgspec.json.format(msgspec.json.encode(pictures), indent=1) + b"\n")


if __name__ == "__main__":
    main()
