"""What DeepSpeed compiles its operators with; nothing else here is compiled."""

import ctypes.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from cifar_zero.diagnosis.finding import Finding, Options, ok, warning

NEEDED_BY = "the *_offload strategies with Adam"
LIBAIO_HEADER = Path("/usr/include/libaio.h")


def compiler(options: Options) -> Finding:
    """Whether the compiler that torch calls is there ($CXX or c++: torch.utils.cpp_extension.get_cxx_compiler), and the
    header files of this Python."""
    name = shlex.split(os.environ.get("CXX", "c++"))[0]
    program = shutil.which(name)
    if program is None:
        other = shutil.which("g++") or shutil.which("clang++")
        mend = f"export CXX={other}" if other else "apt-get install g++ (Debian), dnf install gcc-c++ (Fedora)"
        return warning(f"no {name} on PATH, {NEEDED_BY} compile one operator with it", mend)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return warning(f"no {header}, {NEEDED_BY} compile one operator with it", "apt-get install python3-dev")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return ok(f"{program}: {said.splitlines()[0]}")


def ninja(options: Options) -> Finding:
    """Whether ninja is on PATH, where alone torch looks for it: it may lie beside a Python that is not."""
    program = shutil.which("ninja")
    if program is not None:
        return ok(program)
    beside = Path(sys.executable).parent
    mend = f"export PATH={shlex.quote(str(beside))}:$PATH" if (beside / "ninja").exists() else "pip install ninja"
    return warning(f"no ninja on PATH, {NEEDED_BY} compile one operator with it", mend)


def libaio(options: Options) -> Finding:
    """Whether libaio is there, with its header file (DeepSpeed issues 6972 and 7346)."""
    missing = []
    if not ctypes.util.find_library("aio"):
        missing.append("no libaio")
    if not LIBAIO_HEADER.exists():
        missing.append(f"no {LIBAIO_HEADER}")
    if missing:
        return warning(
            f"{' and '.join(missing)}, which deepspeed_stage_3_offload_nvme alone needs",
            "apt-get install libaio-dev (Debian), dnf install libaio-devel (Fedora)",
        )
    return ok("it is there, for deepspeed_stage_3_offload_nvme")
