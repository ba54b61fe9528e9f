"""Groups of commands: those of the core, and those that plug-ins add. Each is imported when it is called."""

from collections.abc import Iterable, Mapping
from typing import Any

import click

from harness import registry


class Group(click.Group):
    """A group whose help has the first sentence of every command, whole."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self.by_section(ctx).items():
            commands = {name: self.get_command(ctx, name) for name in names}
            lines = [(name, command.get_short_help_str(limit=1_000)) for name, command in commands.items() if command]
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)

    def by_section(self, ctx: click.Context) -> Mapping[str, Iterable[str]]:
        """Return the names of the commands by the title of a section of the help."""
        return {"Commands": self.list_commands(ctx)}


class LazyGroup(Group):
    """A group whose commands are named by their place, as "module:object", by the sections of its help.

    `path`: the words of the group behind `fp8-harness`, by which plug-ins add commands to it.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Mapping[str, str]], path: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self._own, self._path = sections, path

    def _sections(self) -> dict[str, dict[str, str]]:
        sections = {title: dict(places) for title, places in self._own.items()}
        for name, (title, place) in registry.commands(self._path).items():
            sections.setdefault(next(iter(sections)) if self._path else title, {})[name] = place
        return sections

    def _places(self) -> dict[str, str]:
        return {name: place for places in self._sections().values() for name, place in places.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._places())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        words = f"{self._path} {cmd_name}".strip()
        place = self._places().get(cmd_name)
        if place is None and registry.is_offered(words):
            raise registry.needed(words, where=f"fp8-harness {words}")
        if place is None:
            return None
        command = registry.load(place)
        assert isinstance(command, click.Command)
        return command

    def by_section(self, ctx: click.Context) -> Mapping[str, Iterable[str]]:
        return self._sections()
