"""Registries of lazily imported classes and functions, open to code outside the package."""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, TypeVar

from flow_factory.errors import InputError

T = TypeVar("T")
PLUGIN_GROUP = "flow_factory.plugins"
_plugins_loaded = False


class Registry:
    """Maps lower-case keys to objects, given either directly or as a dotted path imported on first use.

    Look-up is case-insensitive; a key that is not registered is tried as a dotted Python path
    (`my_package.my_module.MyClass`); then an error lists the nearest keys.

    Args:
        kind: What the registry holds, for messages ("reward model").
        entries: Built-in keys and their dotted paths.
        field: The configuration field that selects from this registry, for messages ("rewards[].reward_model").
    """

    def __init__(self, kind: str, entries: dict[str, str], field: str = "") -> None:
        self.kind = kind
        self.field = field
        self._entries: dict[str, Any] = {key.lower(): path for key, path in entries.items()}

    def register(self, key: str) -> Callable[[T], T]:
        """Decorator that registers a class or function under `key`.

        Raises:
            InputError: If the key is taken by something else.
        """

        def decorate(obj: T) -> T:
            known = self._entries.get(key.lower())
            # The same object may come twice: a built-in's own decorator, or a module that is imported again.
            if known is not None and known is not obj and _dotted(known) != _dotted(obj):
                raise InputError(f"{self.kind} {key!r} is already registered as {_dotted(known)}; choose another name.")
            self._entries[key.lower()] = obj
            return obj

        return decorate

    def keys(self) -> list[str]:
        """All registered keys, sorted."""
        load_plugins()
        return sorted(self._entries)

    def __contains__(self, key: str) -> bool:
        return key.lower() in self._entries

    def path(self, key: str) -> str:
        """The dotted path of a registered key, without importing it."""
        return _dotted(self._entries[key.lower()])

    def get(self, key: str) -> Any:
        """The object registered under `key`, or found at the dotted path `key`.

        Raises:
            InputError: If there is no such key and no such importable object.
        """
        if key.lower() not in self._entries:
            load_plugins()
        entry = self._entries.get(key.lower())
        if entry is None:
            if "." in key:
                return import_dotted(key, self.kind, self.field)
            raise InputError(self._unknown(key))
        return import_dotted(entry, self.kind, self.field) if isinstance(entry, str) else entry

    def _unknown(self, key: str) -> str:
        near = difflib.get_close_matches(key.lower(), self._entries, n=3, cutoff=0.5)
        place = f" ({self.field})" if self.field else ""
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        return (
            f"unknown {self.kind} {key!r}{place}.{hint} Known: {', '.join(sorted(self._entries))}; "
            f"or give a dotted path such as my_package.my_module.MyClass."
        )


def import_dotted(path: str, kind: str = "object", field: str = "") -> Any:
    """Imports `package.module.name`.

    Raises:
        InputError: If the module or the name in it does not exist, or the module itself fails.
    """
    place = f" ({field})" if field else ""
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise InputError(f"{kind} {path!r}{place} is not a dotted path; write it as package.module.name.")
    try:
        with naming_import_errors(f"{kind} {path!r}{place}", module_name):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only a missing piece of the path itself is the user's typo; a missing dependency of that module is not.
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise InputError(
                f"{kind} {path!r}{place}: there is no module {error.name!r}. Check the spelling, or put its folder on "
                f"PYTHONPATH."
            ) from error
        raise
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise InputError(f"{kind} {path!r}{place}: module {module_name!r} has no {name!r}.{hint}")
    return getattr(module, name)


@contextmanager
def naming_import_errors(what: str, module: str | None = None) -> Iterator[None]:
    """Turns whatever somebody's module raises while it is imported into an error that names its file and line.

    Args:
        what: What is imported and which field asked for it, for the message.
        module: The module's dotted name; a `ModuleNotFoundError` for a part of it passes as it is, since then the name
            is wrong and not the module.

    Raises:
        InputError: If the module fails. A `SystemExit` counts: a script must not end the run without a word.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt):
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and module is not None and f"{module}.".startswith(f"{missing}."):
            raise
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        else:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
            place = f"{frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else "it"
        said = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
        hint = f"; install {missing!r} or put its folder on PYTHONPATH" if missing is not None else ""
        raise InputError(f"{what} cannot be imported: {place} raised {said}{hint}.") from error


def load_plugins(names: Iterable[str] = ()) -> None:
    """Imports third-party packages that announce themselves under the entry-point group `flow_factory.plugins`."""
    global _plugins_loaded
    if not _plugins_loaded:
        _plugins_loaded = True
        for point in entry_points(group=PLUGIN_GROUP):
            with naming_import_errors(f"installed plugin {point.name!r} ({point.value})"):
                point.load()
    for name in names:
        importlib.import_module(name)


def describe_object(obj: Any) -> str:
    """`package.module.name (file.py:12)`, for errors about somebody's function or class; the place if it is known."""
    name = getattr(obj, "__qualname__", type(obj).__qualname__)
    label = f"{getattr(obj, '__module__', type(obj).__module__)}.{name}"
    try:
        file, (_, line) = inspect.getsourcefile(obj), inspect.getsourcelines(obj)
    except (TypeError, OSError):  # built-in, or typed into a console
        return label
    return f"{label} ({file}:{max(line, 1)})"


def _dotted(entry: Any) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}.{entry.__qualname__}"
