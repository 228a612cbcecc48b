"""Is this machine fit to train? The checks of doctor.py, in the order in which they are made.

To add one, write a function from `Options` to `Finding` beside others of its family and a line here. It imports torch,
where it needs it, by itself: a check runs in its own process, and the doctor must answer at once.
"""

from functools import partial

from cifar_zero.diagnosis import devices, network, ops, resources, software, storage, toolchain
from cifar_zero.diagnosis.examination import Check

IMPORT_SECONDS = 180.0
"""For a check that imports torch, which takes minutes from a busy network disk."""

LONG_SECONDS = 3600.0
"""For checks that watch over what they do by themselves: compiling, and ranks that come further."""

CHECKS: dict[str, Check] = {
    "python": Check("Python is new enough", software.python),
    "torch": Check("torch is of the supported range", software.torch_version),
    "torchvision": Check("torchvision loads beside torch", software.torchvision_import, IMPORT_SECONDS),
    "lightning": Check("version of Lightning", partial(software.package, "lightning")),
    "deepspeed": Check("version of DeepSpeed", partial(software.package, "deepspeed")),
    "torchmetrics": Check("version of TorchMetrics", partial(software.package, "torchmetrics")),
    "gpu": Check("torch, the driver and every GPU work together", devices.gpu, IMPORT_SECONDS),
    "nvcc": Check("nvcc is of torch's CUDA", devices.nvcc, IMPORT_SECONDS),
    "compiler": Check("a C++ compiler and Python's header files", toolchain.compiler),
    "ninja": Check("ninja, which runs the compiler", toolchain.ninja),
    "libaio": Check("libaio, for offload to NVMe", toolchain.libaio),
    "locks": Check("no build of an operator makes a run wait", ops.locks, IMPORT_SECONDS),
    "ops": Check("DeepSpeed's operators are built, or can be", ops.operators, LONG_SECONDS),
    "port": Check("the ranks have a port to meet at", network.port),
    "all-reduce": Check("real ranks find one another and add up", network.all_reduce, LONG_SECONDS),
    "cores": Check("cores for each rank", resources.cores),
    "memory": Check("memory for each rank", resources.memory),
    "shm": Check("shared memory for each rank", storage.shared_memory),
    "out": Check("room for runs", storage.out),
    "data-disk": Check("room for images", storage.data_disk),
    "data": Check("the images are there", storage.data),
}
