"""Numbers in messages, with their nouns."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """The count with its noun in the right number: "1 case", "2 cases"; `plural` where it does not end in "s"."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"
