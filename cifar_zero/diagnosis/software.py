"""Checks Python and the packages that a run needs."""

import platform
import sys
from importlib import metadata
from pathlib import Path

from cifar_zero.diagnosis.finding import INSTALL, Finding, Options, failed, ok, warning

PYTHON = (3, 11)
"""Oldest supported Python (pyproject.toml)."""

TORCH = ("2.11", "2.16")
"""Oldest supported torch, and the first version that is not tested (requirements.txt)."""


def python(options: Options) -> Finding:
    """Whether this Python is recent enough."""
    if sys.version_info < PYTHON:
        return failed(f"{platform.python_version()}, but 3.11 is needed", "make setup PYTHON=python3.12")
    return ok(platform.python_version())


def torch_version(options: Options) -> Finding:
    """Whether torch is in the supported range."""
    from packaging.version import Version

    oldest, first_unknown = map(Version, TORCH)
    version = Version(metadata.version("torch"))
    if version < oldest:
        return failed(f"{version}, but {oldest} is needed", INSTALL)
    if Version(version.base_version) >= first_unknown:
        return warning(f"{version}, newer than the tested versions", INSTALL)
    return ok(str(version))


def torchvision_import(options: Options) -> Finding:
    """Whether torchvision can be imported: one built for another torch lacks operators or symbols."""
    try:
        import torchvision
    except (RuntimeError, OSError, ImportError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        return failed(f"it cannot be imported next to torch {metadata.version('torch')} ({why})", INSTALL)
    return ok(str(torchvision.__version__))


def package(name: str, options: Options) -> Finding:
    """Whether a package is installed, in the tested version."""
    from packaging.version import Version

    wanted = Version(pinned(name, options.requirements))
    try:
        version = Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return failed("not installed", INSTALL)
    if version.public != wanted.public:
        return warning(f"{version}, but {wanted} is the tested version", f"pip install {name}=={wanted}")
    return ok(str(version))


def pinned(name: str, requirements: Path) -> str:
    """Returns the version of a package in requirements.txt."""
    from packaging.requirements import Requirement

    lines = (line.split("#")[0].strip() for line in requirements.read_text().splitlines())
    (found,) = [wanted for wanted in map(Requirement, filter(None, lines)) if wanted.name == name]
    return next(iter(found.specifier)).version
