"""Checks DeepSpeed's operators, which are compiled at their first use: each in a folder of torch's, under a lock."""

from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cifar_zero.core.errors import short
from cifar_zero.core.programs import command
from cifar_zero.diagnosis.check import Finding, Options, failed, ok, warning
from cifar_zero.strategies.operators import build_root, is_built


def locks(options: Options) -> Finding:
    """Whether a run would wait for a build of another process, which may have been killed."""
    by_existence = waits_for_existence()
    found = blocking(build_root(), by_existence)
    if not found:
        return ok(f"none is held in {build_root()}")
    files = " ".join(map(str, found))
    if by_existence:
        return failed(f"{files} makes a run wait until it is removed", f"rm {files}, unless a build is in progress")
    return warning(f"{files} is held by another process", f"wait for its build, or end it: fuser -v {files}")


def blocking(root: Path, by_existence: bool) -> list[Path]:
    """Returns the lock files under `root` that make a run wait: those that exist, or that the system has locked."""
    return [file for file in sorted(root.glob("*/lock")) if by_existence or _held(file)]


def waits_for_existence() -> bool:
    """Whether this torch waits forever for a lock file that a killed build left behind. Since PyTorch's pull request
    190543 (PyTorch issue 189245) the system locks the file, and a leftover file is free."""
    import torch.utils.cpp_extension

    return hasattr(torch.utils.cpp_extension, "FileBaton")


def operators(options: Options) -> Finding:
    """Whether the operators that a strategy needs on this machine are built, or can be; --build builds them."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    states: dict[str, str] = {}
    for name in ("cpu_adam", "async_io"):  # for the *_offload strategies, and for offload to NVMe
        states[name] = "built" if is_built(name) else "not built" if _compatible(ALL_OPS[name]) else "cannot be built"
        if states[name] != "not built" or not options.build:
            continue
        if blocking(build_root(), waits_for_existence()):
            return failed("not built: a lock is in the way", command("doctor", "locks"))
        try:
            ALL_OPS[name].load(verbose=False)
        except (RuntimeError, OSError, ImportError) as error:
            lines = str(error).splitlines() or [type(error).__name__]  # torch's report of the whole build
            first = next((line for line in lines if "error:" in line), lines[0])
            return failed(f"{name} cannot be built ({short(first)})", "fix what the compiler names")
        states[name] = "built"
    found = ", ".join(f"{name} {state}" for name, state in states.items())
    if "not built" in states.values():
        return warning(f"{found}; the first run that needs it stalls for a minute", command("doctor", "ops", "--build"))
    return ok(found)


def _compatible(builder: Any) -> bool:
    try:
        return bool(builder.is_compatible(verbose=False))
    except Exception:  # each builder raises its own errors on a machine that it does not support
        return False


def _held(file: Path) -> bool:
    try:
        with FileLock(file, timeout=0):
            return False
    except Timeout:
        return True
