"""What the user reads: single lines on the standard error without known messages of the libraries, and commands to run,
which work where and how this program was started."""

import logging
import os
import shlex
import shutil
import sys
import threading
import warnings
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "train.py"
"""The script of a clone that trains, as `cifar-zero train` does."""

WARNINGS = (
    # Lightning 2.6.6 with torch 2.15 (lightning/pytorch/utilities/_pytree.py); can go with the next Lightning.
    ".*LeafSpec.* is deprecated",
    # The memory loader needs no workers.
    ".*does not have many workers.*",
    # There is no validation loader with --data.val_fraction 0.
    "Total length of `list` across ranks is zero.*",
    # A run that --max_steps ends in mid-epoch has no validation, and so no best checkpoint.
    ".*could not find the monitored key in the returned metrics.*",
    # Lightning's own step logging is not used.
    "The number of training batches .* is smaller than the logging interval.*",
    # The data module turns shuffling off for --trainer.overfit_batches.
    "You requested to overfit but enabled train dataloader shuffling.*",
    # A run may be resumed without validation, or another callback of the first one.
    "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided.*",
    # A resumed run has its own folder.
    "The dirpath has changed from .*",
    # cifar-zero evaluate reads a stage 3 checkpoint as it is.
    "When saving the DeepSpeed Stage 3 checkpoint.*",
    # torchmetrics 1.9.0, for a class without test images; its metrics are null in metrics.json.
    "No (positive|negative) samples (found )?in targets?.*",
)

LOG_MESSAGES = (
    # DeepSpeed without a GPU.
    "Setting accelerator to CPU",
    # torch, if nvcc is installed but no GPU.
    "No CUDA runtime is found",
    # DeepSpeed, for every optimizer but its own; the tests show that they agree.
    "You are using ZeRO with an untested optimizer",
    # torch, when fsdp2 makes a tensor whole that tensor parallelism has cut along the same dimension.
    "While redistributing from",
    # Lightning, at the start of each fit and test.
    "initializing deepspeed distributed",
    "Initializing distributed",
)

LOGGERS = (
    "DeepSpeed",
    "torch.utils.cpp_extension",
    "torch.distributed.tensor._redistribute",
    "lightning.pytorch.strategies.deepspeed",
    "lightning.fabric.utilities.distributed",
)


def say(message: str, *details: str) -> None:
    """Prints one line, and the details below it, indented."""
    print(message, *details, sep="\n  ", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Returns a text with its control characters as escapes: names from files could forge lines, or colour them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def quieten() -> None:
    """Installs the filters; to be called before the Trainer is made."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # "GPU available: ...", "`Trainer.fit` stopped: ..."; the summary shows it.
    for package in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{package}.utilities.rank_zero").setLevel(logging.WARNING)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_news)
    threading.excepthook = _thread_failed


def command(name: str, *arguments: object) -> str:
    """Returns the line for a shell that starts a command: `cifar-zero compare ...`, or `python train.py ...` if this
    process was started so. The paths are those of the running interpreter, seen from the current directory."""
    installed, python = Path(sys.executable).with_name("cifar-zero"), next_to_python(Path(sys.executable).name)
    if name == "train" and _is_script():
        start = [python, _short(SCRIPT)]
    elif installed.exists():
        start = [next_to_python(installed.name), name]
    else:
        start = [python, "-m", "cifar_zero", name]
    return shlex.join([*start, *map(str, arguments)])


def torchrun(name: str, nodes: object = "N", ranks: object = "M") -> str:
    """Returns the command that starts a program on several nodes, with so many ranks each; to be run on each node."""
    program = shlex.quote(_short(SCRIPT)) if name == "train" and _is_script() else f"-m cifar_zero {name}"
    start = f"{shlex.quote(next_to_python('torchrun'))} --nnodes {nodes} --nproc_per_node {ranks}"
    return f"{start} --rdzv_backend c10d --rdzv_endpoint HOST:PORT {program}"


def curves(folder: Path) -> str:
    """Returns how to look at the curves of all runs in a folder: TensorBoard's command, and its page to open."""
    command = f"{shlex.quote(next_to_python('tensorboard'))} --logdir {shlex.quote(str(folder))} --host localhost"
    return f"{command}  # then open http://localhost:6006/#custom_scalars"


def next_to_python(name: str) -> str:
    """Returns how a shell starts a program of the running interpreter's environment, which may not be activated: its
    name if PATH leads to it or it does not exist there, otherwise its path."""
    program, found = Path(sys.executable).with_name(name), shutil.which(name)
    known = found is not None and os.path.samefile(os.path.dirname(found), program.parent)
    if known or not program.exists():
        return name
    return _short(program)


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """Shows a thread's exception, except a disk error: TensorBoard's writer raises that in the main thread too."""
    if not isinstance(failed.exc_value, OSError):
        threading.__excepthook__(failed)


def _is_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(known in message for known in LOG_MESSAGES)


def _is_script() -> bool:
    """Whether this process is `python train.py`."""
    return Path(sys.argv[0]).resolve() == SCRIPT.resolve()


def _short(path: Path) -> str:
    """Returns the relative or the absolute path, whichever is shorter."""
    return min(os.path.relpath(path), str(path), key=len)
