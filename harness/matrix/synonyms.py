"""What people who know another tool call an axis, or a value of one: `synonyms.toml`."""

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path


@functools.cache
def _synonyms() -> Mapping[str, tuple[str, ...]]:
    """Return the axes and values that words of other tools stand for."""
    text = Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    found: dict[str, dict[str, None]] = {}
    for table in (tables["axes"], *tables["values"].values()):
        for here, words in table.items():
            for word in words.split():
                found.setdefault(word, {})[here] = None
    return {word: tuple(meant) for word, meant in found.items()}


def meanings(word: str) -> tuple[str, ...]:
    """Return the axes and values that a word of another tool stands for, such as `tp` for `tensor_parallel_degree`."""
    plain = [re.sub(r"[ .-]+", "_", part.lower().lstrip("-")) for part in (word, word.rpartition(".")[2])]
    return next(filter(None, (_synonyms().get(form, ()) for form in plain)), ())
