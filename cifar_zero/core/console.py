"""Prints messages for the user on standard error, and filters out known messages of the libraries. Also builds the
commands that messages tell the user to type, so that they work in the current directory."""

import logging
import os
import shlex
import shutil
import sys
import threading
import warnings
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "train.py"  # only in a clone of the repository

WARNINGS = (
    # Lightning 2.6.6 with torch 2.15 (lightning/pytorch/utilities/_pytree.py). Remove with the next Lightning.
    ".*LeafSpec.* is deprecated",
    # The memory loader needs no workers.
    ".*does not have many workers.*",
    # There is no validation loader with --data.val_fraction 0.
    "Total length of `list` across ranks is zero.*",
    # If --max_steps ends a run in mid-epoch, no validation metric exists to choose a best checkpoint by.
    ".*could not find the monitored key in the returned metrics.*",
    # Lightning's own step logging is not used.
    "The number of training batches .* is smaller than the logging interval.*",
    # The data module turns shuffling off for --trainer.overfit_batches.
    "You requested to overfit but enabled train dataloader shuffling.*",
    # A run may be resumed without validation or without another callback that the first run had.
    "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided.*",
    # A resumed run writes into a new folder.
    "The dirpath has changed from .*",
    # A ZeRO 3 checkpoint needs no conversion, because cifar-zero evaluate reads it as it is.
    "When saving the DeepSpeed Stage 3 checkpoint.*",
    # torchmetrics 1.9.0 warns about a class without test images. The metrics of the class are null in metrics.json.
    "No (positive|negative) samples (found )?in targets?.*",
)

LOG_MESSAGES = (
    # DeepSpeed prints this without a GPU.
    "Setting accelerator to CPU",
    # torch prints this if nvcc is installed but there is no GPU.
    "No CUDA runtime is found",
    # DeepSpeed warns about every optimizer except its own; the tests check the others against plain PyTorch.
    "You are using ZeRO with an untested optimizer",
    # torch warns when fsdp2 gathers a tensor that tensor parallelism has sharded along the same dimension.
    "While redistributing from",
    # Lightning prints these at the start of each fit and test.
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


RESUME_WITH = "resume with:"  # before the command that continues a run


def say(message: str, *details: str) -> None:
    """Prints a line on standard error, followed by each of the details on an indented line. Control characters are
    escaped, except tabs and line breaks."""
    print(printable("\n  ".join((message, *details)), keep="\n\t"), file=sys.stderr, flush=True)


def printable(text: str, keep: str = "") -> str:
    """Returns a text in which unprintable characters are escaped, except those in `keep`. Control characters in names
    that come from files could otherwise forge lines or colour them."""
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def quieten() -> None:
    """Filters known messages out of the output of the libraries and of failed threads. Call it before the Trainer is
    created."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # Drops "GPU available: ..." and "`Trainer.fit` stopped: ...", which the summary shows too.
    for package in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{package}.utilities.rank_zero").setLevel(logging.WARNING)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_news)
    threading.excepthook = _thread_failed


def command(name: str, *arguments: object) -> str:
    """Returns a shell command line that starts a command of this program, such as `cifar-zero compare ...`. It begins
    with `python train.py` instead of `cifar-zero train` if this process was started that way, and with `python -m
    cifar_zero` if `cifar-zero` is not installed. Programs are written as by `next_to_python`."""
    installed, python = Path(sys.executable).with_name("cifar-zero"), next_to_python(Path(sys.executable).name)
    if name == "train" and _is_script():
        start = [python, _short(SCRIPT)]
    elif installed.exists():
        start = [next_to_python(installed.name), name]
    else:
        start = [python, "-m", "cifar_zero", name]
    return shlex.join([*start, *map(str, arguments)])


def torchrun(name: str, nodes: object = "N", ranks: object = "M") -> str:
    """Returns the torchrun command, to be run on every node, that starts a command of this program with `ranks` ranks
    on each."""
    program = shlex.quote(_short(SCRIPT)) if name == "train" and _is_script() else f"-m cifar_zero {name}"
    start = f"{shlex.quote(next_to_python('torchrun'))} --nnodes {nodes} --nproc_per_node {ranks}"
    return f"{start} --rdzv_backend c10d --rdzv_endpoint HOST:PORT {program}"


def curves(folder: Path) -> str:
    """Returns the TensorBoard command for all runs in a folder, with the page to open as a comment."""
    command = f"{shlex.quote(next_to_python('tensorboard'))} --logdir {shlex.quote(str(folder))} --host localhost"
    return f"{command}  # then open http://localhost:6006/#custom_scalars"


def next_to_python(name: str) -> str:
    """Returns what to type in a shell to start the program `name` of this interpreter's environment, activated or not:
    the program's path, or only its name if PATH leads to it or the environment lacks it."""
    program, first = Path(sys.executable).with_name(name), shutil.which(name)
    known = first is not None and os.path.samefile(Path(first).parent, program.parent)
    if known or not program.exists():
        return name
    return _short(program)


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """Prints the exception that ended a thread, but no OSError, because TensorBoard's writer raises it in the main
    thread too."""
    if not isinstance(failed.exc_value, OSError):
        threading.__excepthook__(failed)


def _is_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(known in message for known in LOG_MESSAGES)


def _is_script() -> bool:
    return Path(sys.argv[0]).resolve() == SCRIPT.resolve()


def _short(path: Path) -> str:
    return min(os.path.relpath(path), str(path), key=len)
