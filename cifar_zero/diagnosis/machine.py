"""Checks the machine: its GPUs, memory, disks and the dataset on them, and whether the ranks of a run on this machine
can communicate."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from rich.filesize import decimal

from cifar_zero.config.rules import ranks_in_memory
from cifar_zero.core.console import command
from cifar_zero.core.errors import short
from cifar_zero.core.hardware import cpu_name, free_memory_bytes, has_gpu_driver
from cifar_zero.diagnosis import Finding, existing, failed, ok, warning
from cifar_zero.launch import local_launcher

NO_GPU = "no GPU, so ranks run on the CPU"

FREE_BYTES = 1_000_000_000
"""Least free space for images or runs. CIFAR's archive and its decoded images take 0.36 GB, and a run also writes
checkpoints."""

NEEDED = "the pinned torch needs driver R580 or newer and a GPU of compute capability 7.5 to 12.0 (no V100)"
"""The requirements of torch 2.15's wheel for CUDA 13.2, from its `torch.cuda.get_arch_list()` and from the oldest
driver of CUDA 13 (docs.nvidia.com/cuda/cuda-toolkit-release-notes, minor version compatibility)."""

START_SECONDS = 120.0  # time for the ranks to import torch, which takes longest on a busy machine
STEPS = 10  # more than the collectives of a rank, each of which may take --timeout

GRACE_SECONDS = 2.0  # how long rank 0 may take to report after another rank has failed

ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-batches-py", "cifar-100-python.tar.gz", "cifar-100-python")
"""Files and folders of the CIFAR sources, as torchvision.datasets names them."""


def gpu(options: Namespace) -> Finding:
    """Checks whether torch can compute on each GPU, and whether there is a GPU for each rank."""
    if not has_gpu_driver():
        return ok(f"{NO_GPU} ({cpu_name()})")
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return warning(
            "there is a GPU driver, but this torch is built for the CPU only",
            "install torch for this machine as https://pytorch.org/get-started/locally shows",
        )
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            torch.ones(2, device=f"cuda:{index}").sum().item()
    except (RuntimeError, AssertionError) as error:  # an old driver, or a GPU for which this torch has no kernels
        return failed(
            f"torch, built for {built_for}, cannot compute on the GPU ({short(error)})",
            f"{NEEDED}, or install a torch that supports this machine: https://pytorch.org/get-started/locally",
        )
    count = torch.cuda.device_count()
    if not count:
        return warning("torch finds no GPU, so runs use the CPU", "unset CUDA_VISIBLE_DEVICES")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    if options.ranks > count:
        return warning(f"{names}: fewer GPUs than --ranks {options.ranks}", command("train", "--devices", count))
    return ok(f"{names}; torch is built for {built_for}")


def memory(options: Namespace) -> Finding:
    """Checks whether the free CPU memory is large enough for --ranks ranks."""
    free = free_memory_bytes() / 1e9
    summary = f"{free:.1f} GB are free"
    if (fit := ranks_in_memory()) < options.ranks:
        fix = command("train", "--devices", fit) if fit else "end other programs"
        return failed(f"{summary}, and {options.ranks} ranks take about 1 GB each", fix)
    return ok(f"{summary}, {free / options.ranks:.1f} GB for each of {options.ranks} ranks")


def out(options: Namespace) -> Finding:
    """Checks whether --out, which need not exist yet, can be written and has enough free space for run folders."""
    return _disk(Path(options.out), "choose another directory with --out DIR")


def data(options: Namespace) -> Finding:
    """Checks whether the dataset's directory has images, can be written and has enough free space, for the archive and
    for the decoded images."""
    root = Path(options.data_root)
    disk = _disk(root, "choose another directory with --data.root DIR")
    if disk.status == "failed":
        return disk
    for name in (*ARCHIVES, "train"):
        if (root / name).exists():
            return ok(f"{root / name}; the first run decodes it; {disk.summary}")
    if decoded := sorted((root / ".cifar-zero").glob("cifar*/meta.json")):
        return ok(f"{decoded[0].parent}: decoded images; {disk.summary}")
    return warning(
        f"no images in {root}: a run downloads CIFAR-10 (170 MB), or trains on digits if it cannot",
        f"put {ARCHIVES[0]} into {root}, or name its directory with --data.root DIR",
    )


def _disk(folder: Path, elsewhere: str) -> Finding:
    """Checks whether a folder, which need not exist yet, can be written and has enough free space. `elsewhere` says how
    to choose another folder."""
    parent = existing(folder).resolve()
    free = shutil.disk_usage(parent).free
    if free < FREE_BYTES:
        summary = f"{decimal(free)} are free in {parent}, less than {decimal(FREE_BYTES)}"
        return failed(summary, f"free some space, or {elsewhere}")
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"1")
    except OSError as error:
        return failed(f"{parent} cannot be written: {error.strerror}", elsewhere)
    return ok(f"{decimal(free)} are free in {folder}")


def all_reduce(options: Namespace) -> Finding:
    """Checks whether --ranks processes on this machine, each with `cifar-zero doctor --nodes`, can connect and sum a
    tensor."""
    if options.ranks == 1:
        return ok("not needed, because there is only one rank")
    if (fit := ranks_in_memory()) < options.ranks:
        return failed(f"not tried, because the memory is too small for {options.ranks} ranks", f"--ranks {max(1, fit)}")
    port, limit = local_launcher.free_port(), START_SECONDS + STEPS * options.timeout
    # The ranks write into files, because a pipe that nobody reads would stop them. Their own --out is the folder of the
    # files: whether the run's can be written is another check.
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(rank, options, port, Path(folder)) for rank in range(options.ranks)]
        deadline, in_time = time.monotonic() + limit, True
        try:
            while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
                in_time = time.monotonic() < deadline
                if not in_time:
                    break
                time.sleep(0.1)
            with suppress(subprocess.TimeoutExpired):
                ranks[0].wait(GRACE_SECONDS)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        report = Path(folder, "0.out").read_text(errors="replace")
        texts = [Path(folder, f"{rank}.err").read_text(errors="replace") for rank in range(options.ranks)]
    start = report.find('{\n  "schema"')  # libraries may print lines around it, such as NCCL with NCCL_DEBUG
    if start >= 0:
        checks, _ = json.JSONDecoder().raw_decode(report, start)
        findings = {check.pop("name"): Finding(**check) for check in checks["checks"]}
        return findings["all-reduce"]
    fix = "if the network interface is the cause: export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo"
    if not in_time:
        return failed(f"the ranks did not end within {limit:g} s", fix)
    errors = [f"rank {rank}: {short(text.splitlines()[-1], 300)}" for rank, text in enumerate(texts) if text.strip()]
    return failed("; ".join(errors) or "a rank ended without an error message", fix)


def _start(rank: int, options: Namespace, port: int, folder: Path) -> subprocess.Popen[bytes]:
    doctor = [sys.executable, "-m", "cifar_zero", "doctor", "--nodes", "--json", "--timeout", str(options.timeout)]
    variables = {**local_launcher.variables(rank, options.ranks, port), "OMP_NUM_THREADS": "1"}
    with Path(folder, f"{rank}.out").open("wb") as output, Path(folder, f"{rank}.err").open("wb") as errors:
        return subprocess.Popen(
            [*doctor, "--out", str(folder)],
            cwd=Path(__file__).parents[2],  # where Python finds this package, installed or not
            env={local_launcher.LOOPBACK: "lo", **os.environ, **variables},
            stdout=output,
            stderr=errors,
        )
