"""Loads the user's classes and functions that the command line names. A class or function that is named only in a file,
such as a checkpoint, is not loaded."""

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from stepcheck.lightning.case import PARTS
from stepcheck.usage import UsageError

_FILES: set[str] = set()  # paths of the user's files that were imported
_ALLOWED: dict[str, Any] = {}  # loaded objects, keyed by their names on the command line


DEFINES_ANY_NAME = ("import *", "globals", "vars", "setattr", "__dict__", "__getattr__", "exec")
"""Words in a Python file that may define names which do not occur in its text."""


def allow(name: str, flag: str) -> None:
    """Loads an object that the command line names in the option `flag`. Then `allowed` returns it."""
    _ALLOWED[name] = load(name, flag)


def allowed(name: str, flag: str) -> Any:
    if name not in _ALLOWED:
        raise UsageError(f"{flag} {name}: it is code, so name it on the command line too")
    return _ALLOWED[name]


def load(name: str, flag: str) -> Any:
    """Imports FILE.py:NAME or PACKAGE.MODULE:NAME and returns the named object. Raises UsageError if it does not exist
    or if the import fails. The error names the option `flag`, and the line of the user's file at which the import
    failed."""
    source, attribute = check_exists(name, flag)
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:  # a user's file may raise anything
        raise UsageError(f"{flag} {name}: {where(error)}{type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        raise UsageError(f"{flag} {name}: {source} has no {attribute}")
    return getattr(module, attribute)


def check_parts(options: Mapping[str, str]) -> None:
    for part in PARTS:
        if part in options:
            check_exists(options[part], f"--{part}")


def check_exists(name: str, flag: str) -> tuple[str, str]:
    """Checks FILE.py:NAME or PACKAGE.MODULE:NAME without importing it, and returns the two sides of the colon. Raises
    UsageError, which names the option `flag`, if `name` has another form, if the file or the package does not exist, or
    if the file's text cannot define the name."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise UsageError(f"{flag} {name}: give FILE.py:NAME or PACKAGE.MODULE:NAME")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise UsageError(f"{flag} {name}: {source} does not exist")
        text = Path(source).read_text(errors="replace")
        is_named = re.search(rf"\b{re.escape(attribute)}\b", text)
        if not is_named and not any(word in text for word in DEFINES_ANY_NAME):
            raise UsageError(f"{flag} {name}: {source} has no {attribute}")
        return source, attribute
    package = source.partition(".")[0]
    if package not in sys.modules and (not package or importlib.util.find_spec(package) is None):
        raise UsageError(f"{flag} {name}: there is no package or module {package!r}")
    return source, attribute


def where(error: BaseException) -> str:
    """Returns "FILE, line N: " for the innermost line of a user's file in the traceback of an error, or an empty string
    if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _FILES]
    if frames:
        return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: "
    return ""


def _import_file(path: Path) -> ModuleType:
    path = path.absolute()
    name = path.stem
    while (loaded := sys.modules.get(name)) is not None:
        if getattr(loaded, "__file__", None) == str(path):
            return loaded
        name += "_"  # another module has this name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.path.append(str(path.parent))  # the modules next to it, as when Python runs the file
    _FILES.add(str(path))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
