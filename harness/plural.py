"""Numbers in messages, with their nouns and units."""

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(count: int, noun: str, plural: str = "") -> str:
    """The count with its noun in the right number: "1 case", "2 cases"; `plural` where it does not end in "s"."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def binary_bytes(count: int) -> str:
    """A number of bytes with a binary unit: "71.5 MiB"."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_BINARY_UNITS) - 1)
    return f"{count / 1024**power:.4g} {_BINARY_UNITS[power]}"
