"""Checks what DeepSpeed needs to compile its operators."""

import ctypes.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from cifar_zero.diagnosis.finding import Finding, Options, ok, warning

NEEDED_BY = "the *_offload strategies with Adam need it to compile one operator"
LIBAIO_HEADER = Path("/usr/include/libaio.h")


def compiler(options: Options) -> Finding:
    """Whether the compiler that torch calls ($CXX or c++: torch.utils.cpp_extension.get_cxx_compiler) and the header
    files of this Python are installed."""
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
    """Whether ninja is on PATH, the only place where torch looks for it; it may be installed next to a Python that is
    not on PATH."""
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
