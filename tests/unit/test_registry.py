"""Plug-ins are found by their entry points: those that are gone are left out, and those that are broken say how."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from harness import registry
from harness.errors import HarnessError
from harness.registry import Plugin

HARNESS = Path(registry.__file__).parent


def found(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint) -> tuple[Plugin, ...]:
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    return registry.plugins.__wrapped__()


def entry(value: str) -> EntryPoint:
    return EntryPoint(name=value.partition(":")[0], value=value, group=registry.GROUP)


def module(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return f"{name}:PLUGIN"


def test_every_folder_is_a_plugin_of_its_name_and_nothing_else_is() -> None:
    folders = {path.parent.name: path.parent for path in HARNESS.glob("plugins/*/__init__.py")}
    own = {plugin.name: plugin.folder for plugin in registry.plugins() if plugin.folder in folders.values()}
    assert own == folders and len(own) > 5


def test_the_names_of_what_may_be_missing_are_those_that_plugins_declare() -> None:
    declared: dict[str, str] = {}
    for plugin in registry.plugins():
        offered = (*plugin.commands, *plugin.targets, *plugin.injections, *plugin.answers)
        declared |= dict.fromkeys(offered, plugin.name)
    assert {name: home for name, home in registry._HOMES.items() if home in declared.values()} == declared


def test_everything_that_a_plugin_names_is_there() -> None:
    for plugin in registry.plugins():
        sections = [section.read for section in plugin.sections.values()]
        checks = [kind.check for kind in plugin.injections.values()]
        for place in (
            *plugin.commands.values(),
            *plugin.checks,
            *plugin.rules,
            *plugin.answers.values(),
            *sections,
            *checks,
        ):
            assert registry.load(place) is not None


def test_a_plugin_whose_folder_is_gone_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = entry("harness.plugins.gone:PLUGIN")
    text = "from harness.registry import Plugin\nPLUGIN = Plugin(name='here', summary='')\n"
    here = entry(module(tmp_path, "plugin_that_is_here", text, monkeypatch))
    assert [plugin.name for plugin in found(monkeypatch, gone, here)] == ["here"]
    assert found(monkeypatch, gone) == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("PLUGIN = 1\n", "is no harness.registry.Plugin"),
        ("", "AttributeError"),
    ],
)
def test_a_plugin_that_cannot_be_imported_says_why(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = module(tmp_path, "broken_plugin", text, monkeypatch)
    with pytest.raises(HarnessError, match="plug-in broken_plugin: it cannot be imported") as raised:
        found(monkeypatch, entry(value))
    assert says in raised.value.text and "Fix: correct the package" in raised.value.text


def test_what_no_plugin_adds_names_the_plugin_that_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "plugins", lambda: ())
    with pytest.raises(HarnessError, match=r"bug list: it needs the plug-in bugs\. Fix: install all of fp8-harness"):
        registry.answer("bug files", where="bug list")
    assert registry.is_offered("predict") and not registry.is_offered("predicts")
