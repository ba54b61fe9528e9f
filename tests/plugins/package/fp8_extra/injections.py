from harness.errors import HarnessError


def known(name: str) -> None:
    if name != "loud":
        raise HarnessError(f"no injection is named '{name}'.", where=f"extra:{name}", fix="write extra:loud.")
