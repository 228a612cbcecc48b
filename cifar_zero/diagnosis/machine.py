"""Checks the machine: its GPUs, their driver and CUDA toolkit, CPU cores, memory, disks, and the images on them; and
that the ranks of a run on it find each other."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from rich.filesize import decimal

from cifar_zero.config.flags import DataConfig
from cifar_zero.config.rules.devices import CPU_RANK_BYTES
from cifar_zero.core.errors import RunError, short
from cifar_zero.core.hardware import core_count, cpu_name, free_memory_bytes, has_gpu_driver
from cifar_zero.core.programs import command
from cifar_zero.diagnosis.check import Finding, Options, failed, ok, warning
from cifar_zero.launch import local_launcher

NO_GPU = "no GPU, ranks run on the CPU"

FREE_BYTES = 1_000_000_000
"""Free space that a disk needs: CIFAR's archive and its decoded images take 0.36 GB, and a run writes checkpoints."""

SHARED_BYTES = 64_000_000
"""Shared memory per rank, for the buffers of NCCL and of the torch loader's worker processes. A Docker container has 64
MB for all ranks by default (`docker run --shm-size`)."""

NEEDED = "the pinned torch needs driver R580 or newer and a GPU of compute capability 7.5 to 12.0 (no V100)"
"""What torch 2.15's wheel for CUDA 13.2 runs on: its `torch.cuda.get_arch_list()`, and the oldest driver of CUDA 13
(docs.nvidia.com/cuda/cuda-toolkit-release-notes, minor version compatibility)."""

NVCC_IS_FOR = "offload to NVMe, or a quantized --zero switch,"
"""What DeepSpeed (0.19.8) compiles against CUDA."""

GRACE_SECONDS = 2.0  # how long rank 0 may take to report after another rank has failed

ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-batches-py", "cifar-100-python.tar.gz", "cifar-100-python")
"""Files and folders of the CIFAR sources, as torchvision.datasets names them."""


def gpu(options: Options) -> Finding:
    if not has_gpu_driver():
        return ok(f"{NO_GPU} ({cpu_name()})")
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return warning(
            "there is a GPU driver, but this torch is built for the CPU and trains there",
            "install the torch that https://pytorch.org/get-started/locally names for this machine",
        )
    if not torch.cuda.device_count() and "CUDA_VISIBLE_DEVICES" in os.environ:
        return warning("CUDA_VISIBLE_DEVICES hides the GPUs: runs use the CPU", "unset CUDA_VISIBLE_DEVICES")
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            torch.ones(2, device=f"cuda:{index}").sum().item()
    except (RuntimeError, AssertionError) as error:  # an old driver; a GPU that this torch has no kernels for
        return failed(
            f"torch, built for CUDA {torch.version.cuda}, cannot compute on the GPU ({short(error)})",
            f"{NEEDED}, or install a torch that supports this machine: https://pytorch.org/get-started/locally",
        )
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    if options.ranks > count:
        return warning(f"{names}: fewer than the {options.ranks} of --ranks", command("train", "--devices", count))
    return ok(f"{names}; torch is built for CUDA {torch.version.cuda}")


def nvcc(options: Options) -> Finding:
    """Whether nvcc has the CUDA version that torch is built for. With another major version DeepSpeed's operators for
    the GPU cannot be compiled (DeepSpeed issues 3223 and 6636), which few runs need."""
    if not has_gpu_driver():
        return ok(f"not needed: {NO_GPU}")
    import torch
    from deepspeed.ops.op_builder.builder import MissingCUDAException, installed_cuda_version

    if torch.version.cuda is None:
        return ok("not needed: torch is not built for CUDA")
    try:
        major, minor = installed_cuda_version()
    except MissingCUDAException:
        return warning(f"none, which {NVCC_IS_FOR} needs", f"install the CUDA toolkit {torch.version.cuda}")
    if major != int(torch.version.cuda.split(".")[0]):
        return warning(
            f"nvcc has CUDA {major}.{minor}, torch {torch.version.cuda}: {NVCC_IS_FOR} cannot be compiled",
            f"install the CUDA toolkit {torch.version.cuda} and set CUDA_HOME to it",
        )
    return ok(f"CUDA {major}.{minor}; torch is built for {torch.version.cuda}")


def cores(options: Options) -> Finding:
    count = core_count()
    if count < options.ranks:
        return warning(f"{count} for {options.ranks} ranks, which take turns", command("train", "--devices", count))
    return ok(f"{count}, {count // options.ranks} for each of {options.ranks} ranks")


def memory(options: Options) -> Finding:
    free = free_memory_bytes() / 1e9
    found = f"{free:.1f} GB are free"
    if (fit := ranks_in_memory()) < options.ranks:
        fix = command("train", "--devices", fit) if fit else "end other programs"
        return failed(f"{found}, and {options.ranks} ranks take about 1 GB each", fix)
    return ok(f"{found}, {free / options.ranks:.1f} GB for each of {options.ranks} ranks")


def ranks_in_memory() -> int:
    """Returns how many CPU ranks fit into the free memory, possibly 0."""
    return free_memory_bytes() // CPU_RANK_BYTES


def shared_memory(options: Options) -> Finding:
    if not local_launcher.SHARED_MEMORY.is_dir():
        return ok(f"no {local_launcher.SHARED_MEMORY} on this system")
    free, needed = shutil.disk_usage(local_launcher.SHARED_MEMORY).free, options.ranks * SHARED_BYTES
    if free < needed:
        fix = "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
        return warning(f"{decimal(free)} are free, but {options.ranks} ranks may need {decimal(needed)}", fix)
    return ok(f"{decimal(free)} are free")


def out(options: Options) -> Finding:
    return _disk([Path(options.out)], "choose another directory with --out DIR")


def data(options: Options) -> Finding:
    """Whether there are images; if they still have to be downloaded or decoded, whether they can be written."""
    if decoded := _decoded(options):
        return ok(decoded)
    root = Path(options.data_root)
    found = next((str(root / name) for name in ARCHIVES if (root / name).exists()), "")
    if not found and (root / "train").is_dir() and (root / "test").is_dir():
        found = f"{root}/train and {root}/test"
    written = [Path(options.data_cache or root / ".cifar-zero"), *([] if found else [root])]
    disk = _disk(written, "choose another directory with --data.root DIR or --data.cache DIR")
    if disk.status == "failed":
        return disk
    if found:
        return ok(f"{found}; the first run decodes it; {disk.found}")
    return warning(
        f"no images in {root}: a run downloads CIFAR-10 (170 MB), or trains on digits if it cannot",
        f"put {ARCHIVES[0]} into {root}, or name its directory with --data.root DIR",
    )


def _decoded(options: Options) -> str:
    """Describes the decoded images that a run can use; empty if there are none."""
    from cifar_zero.data import load

    for source in ("cifar10", "cifar100"):
        with suppress(RunError):
            images = load(DataConfig(source=source, root=options.data_root, cache=options.data_cache), source)
            return f"{len(images.train_images):,} training images of {source}, decoded"
    return ""


def _disk(folders: list[Path], elsewhere: str) -> Finding:
    """Whether folders, which need not exist yet, can be written and have room."""
    sizes: list[int] = []
    for folder in folders:
        while not folder.exists():
            folder = folder.parent
        sizes.append(shutil.disk_usage(folder).free)
        if sizes[-1] < FREE_BYTES:
            found = f"{decimal(sizes[-1])} are free in {folder.resolve()}, less than {decimal(FREE_BYTES)}"
            return failed(found, f"free some space, or {elsewhere}")
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"1")
        except OSError as error:
            return failed(f"{folder.resolve()} cannot be written: {error.strerror}", elsewhere)
    return ok(f"{decimal(min(sizes))} are free in {', '.join(map(str, folders))}")


def port(options: Options) -> Finding:
    named = os.environ.get("MASTER_PORT")
    if named is None:
        return ok(f"MASTER_PORT is not set, {local_launcher.free_port()} is free")
    fix = f"unset MASTER_PORT, or export MASTER_PORT={local_launcher.free_port()}"
    if not named.isdecimal() or not 0 < int(named) < 2**16:
        return failed(f"MASTER_PORT={named} is not a port", fix)
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
            listener.bind(("", int(named)))
            listener.listen()
    except OSError as error:
        return failed(f"MASTER_PORT={named}: {error.strerror}", fix)
    return ok(f"MASTER_PORT={named} is free")


def all_reduce(options: Options) -> Finding:
    """Whether real ranks on this machine meet and sum a tensor: starts `doctor.py --nodes` as each of them."""
    if options.ranks == 1:
        return ok("not needed: a single rank has no others to meet")
    if (fit := ranks_in_memory()) < options.ranks:
        return failed(f"not tried: there is no memory for {options.ranks} ranks", f"--ranks {max(1, fit)}")
    master = local_launcher.free_port()
    ranks = [_start(rank, options, master) for rank in range(options.ranks)]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
            time.sleep(0.1)
        with suppress(subprocess.TimeoutExpired):
            ranks[0].wait(GRACE_SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
    printed = [rank.communicate() for rank in ranks]
    if report := printed[0][0]:
        (found,) = [check for check in json.loads(report)["checks"] if check.pop("name") == "all-reduce"]
        return Finding(**found)
    errors = [
        f"rank {rank}: {short(text.splitlines()[-1], 300)}" for rank, (_, text) in enumerate(printed) if text.strip()
    ]
    return failed(
        "; ".join(errors) or "a rank ended without an error message",
        "if the network interface is the cause: export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo",
    )


def _start(rank: int, options: Options, master: int) -> subprocess.Popen[str]:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.ranks, "LOCAL_WORLD_SIZE": options.ranks}
    places |= {"MASTER_ADDR": local_launcher.ADDRESS, "MASTER_PORT": master, "OMP_NUM_THREADS": 1}
    return subprocess.Popen(
        [sys.executable, sys.argv[0], "--nodes", "--json", "--timeout", str(options.timeout), "--out", options.out],
        env={**os.environ, **{name: str(value) for name, value in places.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
