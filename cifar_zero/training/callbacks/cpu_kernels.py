"""Chooses, for ranks on the CPU, the number of threads and the convolution kernels that suit the size of a batch, and
keeps memory between steps."""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

FLOPS_PER_THREAD = 50_000_000
"""Smallest number of floating-point operations per thread, in the forward and backward pass of a micro-batch. With
fewer, another thread costs more in synchronisation than it gains. On two cores, a second thread gained 9 % for 4 images
of Net and 5 % for 16 images, and made a step 12 times slower while another program was using the cores."""

ONEDNN_FLOPS = 20_000_000
"""Number of floating-point operations of a micro-batch below which torch's own convolution kernels are faster than
those of oneDNN, whose calls have a fixed cost. Without oneDNN a step of Net was 28 % shorter for 2 images, 10 % shorter
for 4 images (13 million operations), and longer from 8 images on (float32 on an AMD EPYC, torch 2.15;
benchmarks/results/performance.md)."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt (malloc.h)


class CPUKernels(Callback):
    """Chooses the number of threads and the convolution kernels (torch's or oneDNN's) for the size of a training
    micro-batch. In evaluation, whose batches are large, all threads and oneDNN are used. At the start of the training,
    also sets glibc's memory thresholds and calls `demote_network_threads`.

    Args:
        flops: Number of floating-point operations in the forward and backward pass of a training micro-batch.
        precision: Precision of the run.
    """

    def __init__(self, flops: int, precision: str):
        self._all_threads = torch.get_num_threads()
        self._threads = max(1, min(self._all_threads, flops // FLOPS_PER_THREAD))
        self._onednn = flops >= ONEDNN_FLOPS or precision != "32-true"  # only oneDNN has kernels for lower precision

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning sets this variable, which makes torch's Adam (2.15) look for NVIDIA's library in every step, 40 us.
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
        # With these thresholds glibc keeps the memory of one step for the next. Otherwise the system clears large
        # blocks page by page when they are allocated again, which took a fifth of a step of Net for 512 images.
        if sys.platform == "linux":
            libc = ctypes.CDLL(None)
            libc.mallopt(M_TRIM_THRESHOLD, 2**30)
            libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the largest value that glibc accepts on 64 bits
        demote_network_threads()
        self.on_validation_end(trainer, pl_module)

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(self._all_threads)
        torch.backends.mkldnn.set_flags(True)

    # After the training or an error, this process may train another run.
    on_test_start = on_train_end = on_exception = on_validation_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.set_num_threads(self._threads)
        torch.backends.mkldnn.set_flags(self._onednn)


def demote_network_threads() -> None:
    """Keeps gloo's network threads from taking the core from the threads for which they send and receive, on Linux and
    if all threads of the process share one core.

    A network thread that finds its connection locked retries without end (gloo in torch 2.15, transport/tcp/pair.cc,
    `Pair::handleEvents`). It wakes up as soon as the thread that holds the lock has sent something, and takes the only
    core from that thread until the next tick of the scheduler (4 ms). With the policy SCHED_BATCH, a thread that wakes
    up displaces no running thread, not even of another program (figures: benchmarks/results/performance.md).
    """
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) > 1:
        return
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended, or a sandbox forbids it
            if (task / "comm").read_text() == "gloo_tcp_loop\n":
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
