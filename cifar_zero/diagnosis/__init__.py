"""The checks of cifar-zero doctor, in the order in which they run.

To add a check, write a function from `Options` to `Finding` (`check.py`) in the file of its family, and a line here.
It imports torch itself if it needs it: each check runs in a process of its own, and the doctor must start quickly.
"""

from functools import partial

from cifar_zero.diagnosis import machine, software
from cifar_zero.diagnosis.check import Check

IMPORT_SECONDS = 180.0  # time limit of a check that imports torch, which takes minutes from a busy network disk
LONG_SECONDS = 3600.0  # time limit of checks that compile, or that have time limits of their own

CHECKS: dict[str, Check] = {
    "python": Check("Python is recent enough", software.python),
    "torch": Check("version of torch", partial(software.package, "torch")),
    "torchvision": Check("torchvision works with this torch", software.torchvision_import, IMPORT_SECONDS),
    "lightning": Check("version of Lightning", partial(software.package, "lightning")),
    "deepspeed": Check("version of DeepSpeed", partial(software.package, "deepspeed")),
    "torchmetrics": Check("version of TorchMetrics", partial(software.package, "torchmetrics")),
    "gpu": Check("torch can compute on each GPU", machine.gpu, IMPORT_SECONDS),
    "compiler": Check("a C++ compiler, Python's header files, ninja and libaio", software.compiler),
    "ops": Check("DeepSpeed's operators are built, or can be", software.operators, LONG_SECONDS),
    "all-reduce": Check("real ranks meet and sum a tensor", machine.all_reduce, LONG_SECONDS),
    "cores": Check("one CPU core per rank", machine.cores),
    "memory": Check("memory for each rank", machine.memory),
    "shm": Check("shared memory for each rank", machine.shared_memory),
    "out": Check("disk space for runs", machine.out),
    "data": Check("images, or disk space for them", machine.data),
}
