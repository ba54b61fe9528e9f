"""Fields that say more of themselves than type and default: a `Declaration` stands where the default does."""

from collections.abc import Mapping
from typing import Any

import msgspec

_OWN: dict[type, Mapping[str, Any]] = {}  # by class, what its fields declare


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """What a field declares. `unset`: its default."""

    unset: Any = None


class Declares(msgspec.StructMeta):
    """Keeps what fields declare, and gives the fields their defaults."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any) -> Any:
        own = {field: value for field, value in namespace.items() if isinstance(value, Declaration)}
        defaults = {field: declaration.unset for field, declaration in own.items()}
        made = super().__new__(mcs, name, bases, {**namespace, **defaults}, **config)
        _OWN[made] = own
        return made


def declared(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return what the fields of a class declare, those that it inherits too, by the name of the field."""
    return {name: value for base in reversed(kind.__mro__) for name, value in _OWN.get(base, {}).items()}
