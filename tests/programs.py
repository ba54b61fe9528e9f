"""Programs that tests run: Python code, and git."""

import os
import subprocess
import sys
from pathlib import Path


def run_script(code: str) -> str:
    """Run Python code in a process of its own; returns what it prints."""
    env = {name: value for name, value in os.environ.items() if name != "JE_ARROW_MALLOC_CONF"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_git(folder: Path, *words: str) -> None:
    """Run git in a folder, whatever the configuration of the user says."""
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def make_commit(folder: Path, *names: str) -> None:
    """Make the folder a git repository with one commit of these files and folders."""
    for words in (("init",), ("add", *names), ("commit", "-m", "first")):
        run_git(folder, *words)
