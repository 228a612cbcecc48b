"""What the user reads on the standard error: single lines, without known messages of the libraries."""

import logging
import sys
import threading
import warnings

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
    # evaluate.py reads a stage 3 checkpoint as it is.
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


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """Shows a thread's exception, except a disk error: TensorBoard's writer raises that in the main thread too."""
    if not isinstance(failed.exc_value, OSError):
        threading.__excepthook__(failed)


def _is_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(known in message for known in LOG_MESSAGES)
