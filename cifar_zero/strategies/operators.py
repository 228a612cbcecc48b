"""DeepSpeed's C++ operators, which are compiled at their first use, in a folder of torch's."""

import os
import sys
from pathlib import Path

from cifar_zero.core.console import say


def build_root() -> Path:
    """Returns where torch keeps a folder per operator (cpp_extension._get_build_directory would create it)."""
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named)
    cuda = torch.version.cuda
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return Path(get_default_build_root(), f"{python}_cpu" if cuda is None else f"{python}_cu{cuda.replace('.', '')}")


def is_built(name: str) -> bool:
    """Whether a DeepSpeed operator is compiled, so that a run that needs it starts at once. All environments of a
    Python version share one folder per operator, but each compiles it again: ninja does so if the command changes, and
    the command contains the path of torch's headers."""
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import include_paths

    if installed_ops.get(name):
        return True
    folder = build_root() / name
    commands = folder / "build.ninja"
    return (folder / f"{name}.so").exists() and commands.exists() and include_paths()[0] in commands.read_text()


def load(name: str, announces: bool) -> None:
    """Loads an operator. If it must be compiled first and this rank `announces`, prints a line; the other ranks of the
    computer wait meanwhile."""
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    if announces and not is_built(name):
        say(f"compiling DeepSpeed's {name}: a minute or more, only at its first use on this computer")
    ALL_OPS[name].load(verbose=False)
