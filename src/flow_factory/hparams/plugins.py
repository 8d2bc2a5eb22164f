"""Users' own modules and files, imported before a configuration is read so that what they register is known."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flow_factory.errors import InputError
from flow_factory.registry import naming_import_errors


def locate_plugins(values: dict[str, Any], folder: Path, more: Sequence[str] = ()) -> None:
    """Makes the paths of plugin files absolute, so that the saved configuration finds them from any folder.

    Args:
        values: The configuration; changed in place.
        folder: The configuration's own folder, where files are looked for first, then in the working directory.
        more: Plugins that are not written in it.
    """
    given = values.get("plugins") or []
    if not isinstance(given, list):
        return  # reported with the other fields
    located: list[Any] = [_located(plugin, folder) for plugin in given]
    located += [_located(plugin, Path.cwd()) for plugin in more]
    if located:
        values["plugins"] = list(dict.fromkeys(located)) if all(isinstance(p, str) for p in located) else located


def _located(plugin: Any, folder: Path) -> Any:
    if not isinstance(plugin, str) or not _is_file(plugin):
        return plugin
    path = Path(plugin).expanduser()
    found = next((p for p in (folder / path, Path.cwd() / path) if p.is_file()), None)
    return plugin if found is None else str(found.resolve())


def _is_file(plugin: str) -> bool:
    return plugin.endswith(".py") or "/" in plugin


def import_plugins(plugins: Sequence[str]) -> None:
    """Imports plugin modules and files so that their registrations take effect. A file is imported once.

    Raises:
        InputError: If there is no such module or file, or it fails.
    """
    for plugin in plugins:
        if _is_file(plugin):
            _import_file(plugin)
            continue
        if not all(part.isidentifier() for part in plugin.split(".")):
            raise InputError(f"plugins: {plugin!r} is neither a dotted module name nor the path of a .py file.")
        try:
            with naming_import_errors(f"plugins: module {plugin!r}", plugin):
                importlib.import_module(plugin)
        except ModuleNotFoundError as error:
            raise InputError(
                f"plugins: there is no module {plugin!r}; check the spelling, put its folder on PYTHONPATH, or give "
                f"the path of a .py file."
            ) from error


def _import_file(plugin: str) -> None:
    file = Path(plugin).expanduser().resolve()
    if not file.is_file():
        raise InputError(
            f"plugins: the file {plugin!r} does not exist; it is looked for beside the configuration, then in the "
            f"working directory ({Path.cwd()})."
        )
    if getattr(sys.modules.get(file.stem), "__file__", None) == str(file):
        return  # imported under its own name already, from Python or as the module of a dotted path
    name = f"flow_factory_plugin_{file.stem}"
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(file):
            return
        raise InputError(f"plugins: two plugin files are called {file.name}; rename one.")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"plugins: {plugin!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with naming_import_errors(f"plugins: {plugin!r}"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
