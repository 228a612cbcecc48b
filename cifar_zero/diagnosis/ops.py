"""DeepSpeed's operators: compiled at their first use, each into a folder of torch's, under a lock."""

import os
import sys
from pathlib import Path
from typing import Any

from cifar_zero.diagnosis.examination import one_line
from cifar_zero.diagnosis.finding import Finding, Options, failed, ok, warning

BUILD_COMMAND = "python doctor.py ops --build"

NOT_AN_OPERATOR = "deepspeed_not_implemented"
"""DeepSpeed (0.19.8) lists this placeholder among its operators."""


def locks(options: Options) -> Finding:
    """Whether a run would wait for the build of another one, that may have been killed."""
    by_existence = waits_for_existence()
    found = blocking(build_root(), by_existence)
    if not found:
        return ok(f"none is held in {build_root()}")
    files = " ".join(map(str, found))
    if by_existence:
        return failed(f"{files} makes a run wait until it is gone", f"rm {files}, unless a build is going on")
    return warning(
        f"{files} is held by another process, for which a run waits",
        f"wait for its build, or end it: fuser -v {files}",
    )


def blocking(root: Path, by_existence: bool) -> list[Path]:
    """The lock files that make a run wait.

    Args:
        root: of torch's folders of extensions.
        by_existence: whether the existence of the file is the lock, else it is the system's lock on the file.
    """
    return [file for file in sorted(root.glob("*/lock")) if by_existence or _held(file)]


def waits_for_existence() -> bool:
    """Whether this torch waits for ever for a lock file that a killed build left behind.

    Since PyTorch's pull request 190543 (PyTorch issue 189245) it is locked by the system, and stays behind unlocked.
    """
    import torch.utils.cpp_extension

    return hasattr(torch.utils.cpp_extension, "FileBaton")


def build_root() -> Path:
    """Where torch keeps the operators, each in a folder of its name (cpp_extension._get_build_directory, which would
    also make it)."""
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named)
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    cuda, hip = torch.version.cuda, torch.version.hip
    root = Path(get_default_build_root())
    if hip is not None:  # torch adds ROCm's version in one of two forms
        return next(root.glob(f"{python}_rocm*"), root / f"{python}_rocm")
    return root / (f"{python}_cpu" if cuda is None else f"{python}_cu{cuda.replace('.', '')}")


def operators(options: Options) -> Finding:
    """Which of DeepSpeed's operators are built and which can be; with --build those that a strategy here needs are."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    builders = {name: builder for name, builder in ALL_OPS.items() if name != NOT_AN_OPERATOR}
    possible = {name for name, builder in builders.items() if _compatible(builder)}
    missing = [name for name in _needed() if name in possible and not is_built(name)]
    if options.build and missing:
        if blocking(build_root(), waits_for_existence()):
            return failed("not built: a lock is in the way", "python doctor.py locks")
        for name in missing:
            try:
                builders[name].load(verbose=False)
            except (RuntimeError, OSError, ImportError) as error:
                return failed(f"{name} cannot be built ({_reason(error)})", "mend what the compiler names")
        missing = []
    lists = {
        "built": [name for name in builders if is_built(name)],
        "can be built": [name for name in builders if name in possible and not is_built(name)],
        "cannot be": [name for name in builders if name not in possible],
    }
    found = "; ".join(f"{what}: {', '.join(names)}" for what, names in lists.items() if names)
    if missing:
        return warning(f"{found}; the first run that needs {' or '.join(missing)} stalls for a minute", BUILD_COMMAND)
    return ok(found)


def _needed() -> list[str]:
    """CPU Adam: the *_offload strategies; async_io: offload to NVMe; fused Adam: ZeRO on CUDA where there is nvcc."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    on_cuda = torch.cuda.is_available() and CUDA_HOME is not None
    return ["cpu_adam", "async_io", *(["fused_adam"] if on_cuda else [])]


def _compatible(builder: Any) -> bool:
    try:
        return bool(builder.is_compatible(verbose=False))
    except Exception:  # each builder has errors of its own for a machine that it is not for
        return False


def is_built(name: str) -> bool:
    """Whether an operator of DeepSpeed's is compiled: a run that needs it does not wait for that.

    All environments of a Python version share one folder of them, and each compiles anew what another one has: ninja
    does whenever the command is another, and it names torch's headers.
    """
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import include_paths

    folder = build_root() / name
    if installed_ops.get(name):
        return True
    commands = folder / "build.ninja"
    return (folder / f"{name}.so").exists() and commands.exists() and include_paths()[0] in commands.read_text()


def _held(file: Path) -> bool:
    from filelock import FileLock, Timeout

    try:
        with FileLock(file, timeout=0):
            return False
    except Timeout:
        return True


def _reason(error: Exception) -> str:
    """The compiler's first complaint in torch's report of the whole build."""
    lines = str(error).splitlines()
    return one_line(next((line for line in lines if "error:" in line), lines[0] if lines else type(error).__name__))
