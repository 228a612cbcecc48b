"""Silences messages of the libraries that are known and ask nothing of the user, each by its text."""

from __future__ import annotations

import logging
import threading
import warnings

WARNINGS = (
    # Lightning 2.6.6 with torch 2.15 (lightning/pytorch/utilities/_pytree.py); can go with the next Lightning.
    ".*LeafSpec.* is deprecated",
    # Our memory loader has no workers: it cuts whole batches from memory.
    ".*does not have many workers.*",
    # The data module has no validation loader where --data.val_fraction is 0.
    "Total length of `list` across ranks is zero.*",
    # A run that --max_steps ends in mid-epoch has no validation, and so no best checkpoint; last.ckpt is there.
    ".*could not find the monitored key in the returned metrics.*",
    # Of Lightning's own step logging, which we do not use: the curves have a point at the end of a short run.
    "The number of training batches .* is smaller than the logging interval.*",
    # Of --trainer.overfit_batches: the data module has turned the shuffling off by itself.
    "You requested to overfit but enabled train dataloader shuffling.*",
    # A run resumed without --save_every_n_steps has one callback less than the first.
    "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided.*",
    # A resumed run has a run folder of its own.
    "The dirpath has changed from .*",
    # A stage 3 checkpoint is a folder of shards: evaluate.py reads it as it is.
    "When saving the DeepSpeed Stage 3 checkpoint.*",
    # torchmetrics 1.9.0, of a class without test images, whose figures are null in metrics.json.
    "No (positive|negative) samples (found )?in targets?.*",
)

LOG_MESSAGES = (
    # DeepSpeed without a GPU: the CPU was asked for, or is all there is.
    "Setting accelerator to CPU",
    # torch, where nvcc is installed and a GPU is not.
    "No CUDA runtime is found",
    # DeepSpeed, of every optimizer but its own: the tests hold that they agree.
    "You are using ZeRO with an untested optimizer",
    # Lightning, at each start of a fit and a test.
    "initializing deepspeed distributed",
    "Initializing distributed",
)

LOGGERS = (
    "DeepSpeed",
    "torch.utils.cpp_extension",
    "lightning.pytorch.strategies.deepspeed",
    "lightning.fabric.utilities.distributed",
)


def quieten() -> None:
    """To be called before the Trainer is made; what is not listed here is still shown."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # "GPU available: ...", "`Trainer.fit` stopped: ...": the progress and the summary say it.
    for package in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{package}.utilities.rank_zero").setLevel(logging.WARNING)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_news)
    threading.excepthook = _thread_failed


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """TensorBoard's writer hands an error of the disk to the next call of the main thread: that is the one to show."""
    if not isinstance(failed.exc_value, OSError):
        threading.__excepthook__(failed)


def _is_news(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(known in message for known in LOG_MESSAGES)
