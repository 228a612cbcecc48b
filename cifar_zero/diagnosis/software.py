"""Checks Python, the packages that a run needs, and what DeepSpeed needs to compile its operators."""

import ctypes.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cifar_zero.diagnosis.check import INSTALL, Finding, Options, failed, ok, warning

PYTHON = (3, 11)  # oldest supported Python (pyproject.toml)

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
"""Has the tested ranges, where the program is not installed or is installed as editable."""

DEEPSPEED, LIGHTNING = "https://github.com/deepspeedai/DeepSpeed", "https://github.com/Lightning-AI/pytorch-lightning"

FAULTS = (
    ("lightning", ">=2.6.2,<2.6.4", "", f"steals credentials: {LIGHTNING}/security/advisories/GHSA-w37p-236h-pfx3"),
    ("lightning", "<2.6.6", "", "runs code that a checkpoint's hyperparameters name: CVE-2026-58659"),
    ("deepspeed", ">=0.17.6,<0.18.3", "deepspeed_stage_2", f"loses micro-batches: {DEEPSPEED}/issues/7718"),
    ("deepspeed", ">=0.17.6,<0.18.6", "deepspeed_stage_0", f"is wrong in bfloat16: {DEEPSPEED}/issues/7837"),
    ("deepspeed", "==0.18.3", "deepspeed_*", f"divides gradients by --accumulate twice: {DEEPSPEED}/pull/7724"),
    ("deepspeed", ">=0.15.2,<0.19", "deepspeed_stage_2_offload", f"loses micro-batches: {DEEPSPEED}/pull/7967"),
    ("deepspeed", ">=0.18.3,<0.19", "deepspeed_stage_1_fp32_gradients", f"loses an all-reduce: {DEEPSPEED}/pull/7985"),
    ("deepspeed", "<0.19.4", "deepspeed_stage_3_all_reduce", f"mixes padding into weights: {DEEPSPEED}/pull/8158"),
    ("deepspeed", "<0.19.7", "contiguous_gradients false", f"loses an all-reduce on a CPU: {DEEPSPEED}/pull/8382"),
    ("deepspeed", ">=0.17.6,<0.19.3", "Muon", f"updates with incomplete gradients: {DEEPSPEED}/pull/8141"),
    ("deepspeed", ">=0.17.2,<0.19.4", "WarmupLR", f"warms all groups up to the first's rate: {DEEPSPEED}/pull/8171"),
    ("deepspeed", ">=0.15.3,<0.19", "WarmupCosineLR", f"starts only the first group at 0: {DEEPSPEED}/pull/7969"),
)
"""Releases that install and run, but do harm or train wrongly: package, releases (PEP 440), what shows it, and what is
wrong (docs/acceptance.md#proven-on-real-releases). What shows it are strategies of compare.py --acceptance, or an
option, optimizer or schedule of DeepSpeed, which no case has."""

NEEDED_BY = "the *_offload strategies with Adam need it to compile one operator"
LIBAIO_HEADER = Path("/usr/include/libaio.h")


def python(options: Options) -> Finding:
    if sys.version_info < PYTHON:
        return failed(f"{platform.python_version()}, but 3.11 is needed", "make setup PYTHON=python3.12")
    return ok(platform.python_version())


def torchvision_import(options: Options) -> Finding:
    """Whether torchvision can be imported: one built for another torch lacks operators or symbols."""
    try:
        import torchvision
    except (RuntimeError, OSError, ImportError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        return failed(f"it cannot be imported next to torch {metadata.version('torch')} ({why})", INSTALL)
    return ok(str(torchvision.__version__))


def package(name: str, options: Options) -> Finding:
    """Whether a package is installed, in a tested version."""
    wanted = tested(name)
    try:
        version = Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return failed("not installed", INSTALL)
    if version not in wanted:
        faults = (
            f"{strategy or 'it'} {what}"
            for of, releases, strategy, what in FAULTS
            if of == name and version in SpecifierSet(releases)
        )
        found = "; ".join([f"{version}, but {wanted} is the tested range", *faults])
        return warning(found, f"pip install '{name}{wanted}'")
    asked = list[SpecifierSet]()
    with suppress(metadata.PackageNotFoundError):  # without Lightning, which has a line of its own
        asked = [each.specifier for each in map(Requirement, metadata.requires("lightning") or []) if each.name == name]
    differs = f"; not the {asked[0]} of Lightning's extras, which is older" if asked and version not in asked[0] else ""
    return ok(f"{version}{differs}")


def tested(name: str) -> SpecifierSet:
    """Returns the tested versions of a package: pyproject.toml's range, which an installed program's metadata has."""
    if PROJECT.exists():
        listed = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    else:
        listed = metadata.requires("cifar-zero") or []
    (found,) = [wanted for wanted in map(Requirement, listed) if wanted.name == name]
    return found.specifier


def compiler(options: Options) -> Finding:
    """Whether the compiler that torch calls ($CXX or c++) and the header files of this Python are installed."""
    name = shlex.split(os.environ.get("CXX", "c++"))[0]
    program = shutil.which(name)
    if program is None:
        other = shutil.which("g++") or shutil.which("clang++")
        fix = f"export CXX={other}" if other else "apt-get install g++ (Debian), dnf install gcc-c++ (Fedora)"
        return warning(f"no {name} on PATH; {NEEDED_BY}", fix)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return warning(f"no {header}; {NEEDED_BY}", "apt-get install python3-dev")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return ok(f"{program}: {said.splitlines()[0]}")


def ninja(options: Options) -> Finding:
    """Whether ninja is on PATH, where torch looks; it may be installed next to a Python that is not."""
    if (program := shutil.which("ninja")) is not None:
        return ok(program)
    folder = Path(sys.executable).parent
    fix = f"export PATH={shlex.quote(str(folder))}:$PATH" if (folder / "ninja").exists() else "pip install ninja"
    return warning(f"no ninja on PATH; {NEEDED_BY}", fix)


def libaio(options: Options) -> Finding:
    """Whether libaio and its header file are installed (DeepSpeed issues 6972 and 7346)."""
    missing = [] if ctypes.util.find_library("aio") else ["no libaio"]
    missing += [] if LIBAIO_HEADER.exists() else [f"no {LIBAIO_HEADER}"]
    if missing:
        return warning(
            f"{' and '.join(missing)}; only deepspeed_stage_3_offload_nvme needs it",
            "apt-get install libaio-dev (Debian), dnf install libaio-devel (Fedora)",
        )
    return ok("installed, for deepspeed_stage_3_offload_nvme")
