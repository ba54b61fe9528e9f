"""Hardware classes: the folders of goldens, and which of them are meant for a device."""

from __future__ import annotations

import re

from harness.errors import HarnessError

_VENDORS = {"sm": "nvidia", "gfx": "amd"}  # by what the name of an architecture begins with


def hardware_class(device_name: str) -> str:
    """The folder name of a device: "cpu", or a slug of its name such as "nvidia-h200"."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    if not slug:
        raise HarnessError(f"device name {device_name!r} gives no hardware class.")
    return slug


def hardware_classes(device_name: str, architecture: str = "") -> tuple[str, ...]:
    """All classes of a device, the most specific first: "nvidia-h200", "sm90", "nvidia".

    `architecture` is "sm90", "gfx942" or empty where it is not known. Of two vendors no class is the same.
    """
    own = hardware_class(device_name)
    if own == "cpu":
        return (own,)
    found = re.match(r"(sm|gfx)[0-9a-f]+", architecture)
    vendor = _VENDORS[found[1]] if found else next((name for name in _VENDORS.values() if own.startswith(name)), "")
    return tuple(dict.fromkeys(filter(None, (own, found[0] if found else "", vendor))))
