"""Checks the packages that a run needs, and the tools with which DeepSpeed compiles its operators."""

import os
import shlex
import shutil
import sys
import sysconfig
import tomllib
from argparse import Namespace
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.diagnosis import INSTALL, Finding, failed, ok, warning

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
"""The file with the tested ranges of versions. It exists in a checkout of the repository, but not in an installed
package."""

DEEPSPEED, LIGHTNING = "https://github.com/deepspeedai/DeepSpeed", "https://github.com/Lightning-AI/pytorch-lightning"

ALL_STAGES = "deepspeed_*"  # stands for all strategies of DeepSpeed in FAULTS

FAULTS = (
    ("lightning", ">=2.6.2,<2.6.4", "", f"steals credentials: {LIGHTNING}/security/advisories/GHSA-w37p-236h-pfx3"),
    ("lightning", "<2.6.6", "", "runs code that a checkpoint's hyperparameters name: CVE-2026-58659"),
    ("deepspeed", ">=0.17.6,<0.18.3", "deepspeed_stage_2", f"loses micro-batches: {DEEPSPEED}/issues/7718"),
    ("deepspeed", ">=0.17.6,<0.18.6", "deepspeed_stage_0", f"is wrong in bfloat16: {DEEPSPEED}/issues/7837"),
    ("deepspeed", ">=0.18.3,<0.19.9", "stage 0 in float16", f"does not scale the loss: {DEEPSPEED}/pull/8393"),
    ("deepspeed", "==0.18.3", ALL_STAGES, f"divides gradients by --accumulate twice: {DEEPSPEED}/pull/7724"),
    ("deepspeed", ">=0.15.2,<0.19", "deepspeed_stage_2_offload", f"loses micro-batches: {DEEPSPEED}/pull/7967"),
    ("deepspeed", ">=0.18.3,<0.19", "deepspeed_stage_1_fp32_gradients", f"loses an all-reduce: {DEEPSPEED}/pull/7985"),
    ("deepspeed", "<0.19.4", "deepspeed_stage_3_all_reduce", f"mixes padding into weights: {DEEPSPEED}/pull/8158"),
    ("deepspeed", "<0.19.7", "contiguous_gradients false", f"loses an all-reduce on a CPU: {DEEPSPEED}/pull/8382"),
    ("deepspeed", ">=0.17.6,<0.19.3", "Muon", f"updates with incomplete gradients: {DEEPSPEED}/pull/8141"),
    ("deepspeed", ">=0.17.2,<0.19.4", "WarmupLR", f"warms all groups to the first group's rate: {DEEPSPEED}/pull/8171"),
    ("deepspeed", ">=0.15.3,<0.19", "WarmupCosineLR", f"starts only the first group at rate 0: {DEEPSPEED}/pull/7969"),
)
"""Releases that install and run, but do harm or train wrongly (docs/evidence.md). Each row has the package, its faulty
releases (PEP 440), the strategy or the option, optimizer or schedule of DeepSpeed with which the fault appears, and the
fault itself. If the third column is empty, the fault affects the whole package."""

LIBAIO_HEADER = Path("/usr/include/libaio.h")


def torchvision_import(options: Namespace) -> Finding:
    """Checks whether torchvision can be imported. The import fails if it was built for another version of torch."""
    try:
        import torchvision
    except (RuntimeError, OSError, ImportError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        return failed(f"it cannot be imported next to torch {metadata.version('torch')} ({why})", INSTALL)
    return ok(str(torchvision.__version__))


def package(name: str, options: Namespace) -> Finding:
    """Checks whether a package is installed in a tested version without a known bug. Fails if it is not installed, or
    if a known bug affects all of it or a strategy with its default options, and warns of other bugs and untested
    versions."""
    expected = tested(name)
    try:
        version = Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return failed("not installed", INSTALL)
    faults = [(strategy, what) for of, in_, strategy, what in FAULTS if of == name and version in SpecifierSet(in_)]
    if version in expected and not faults:
        return ok(str(version))
    summary, status = str(version), warning
    if version not in expected:
        summary += f", but {expected} is the tested range"
    if faults:
        summary += f"; known bugs: {len(faults)}"
    if any(strategy in ("", ALL_STAGES, *STRATEGIES) for strategy, _ in faults):
        status = failed
    bugs = tuple(f"{strategy or 'it'} {what}" for strategy, what in faults)
    return status(summary, f"pip install '{name}{expected}'", bugs)


def tested(name: str) -> SpecifierSet:
    """Returns the tested versions of a package, from pyproject.toml or, without a checkout, from the metadata of
    cifar-zero."""
    if PROJECT.exists():
        listed = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    else:
        listed = metadata.requires("cifar-zero") or []
    (requirement,) = [each for each in map(Requirement, listed) if each.name == name]
    return requirement.specifier


def compiler(options: Namespace) -> Finding:
    """Checks what torch needs to compile DeepSpeed's operators: the compiler that torch calls ($CXX or c++), Python's
    header files, and ninja on PATH. NVMe offload also needs libaio (DeepSpeed issues 6972 and 7346)."""
    program = (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]
    header = Path(sysconfig.get_path("include"), "Python.h")
    folder = Path(sys.executable).parent
    on_path = f"export PATH={shlex.quote(str(folder))}:$PATH" if (folder / "ninja").exists() else "pip install ninja"
    parts = (
        (shutil.which(program), f"{program} on PATH", "apt-get install g++"),
        (header.exists(), str(header), "apt-get install python3-dev"),
        (shutil.which("ninja"), "ninja on PATH", on_path),
    )
    names = [name for present, name, _ in parts if not present]
    fixes = [fix for present, _, fix in parts if not present]
    said = []
    if names:
        said.append(f"no {', no '.join(names)}; the *_offload strategies need it to compile an operator")
    if not LIBAIO_HEADER.exists():
        said.append(f"no {LIBAIO_HEADER}; only deepspeed_stage_3_offload_nvme needs it")
        fixes.append("apt-get install libaio-dev")
    if said:
        return warning("; ".join(said), "; ".join(fixes))
    return ok(f"{shutil.which(program)}, ninja and libaio")
