"""All cases: every module of this folder has a list `CASES`."""

from __future__ import annotations

import importlib
import pkgutil

from tests.parity.case import Case


def all_cases() -> list[Case]:
    """The cases of all modules, in the order of their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [case for name in names for case in importlib.import_module(f"{__name__}.{name}").CASES]
