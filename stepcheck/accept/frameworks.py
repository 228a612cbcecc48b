"""Trains cases through Lightning, Accelerate or transformers, as a script for them does. The audit attaches itself, as
under `stepcheck run`."""

import gc
import math
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from stepcheck.accept.cases import MICRO_BATCH, STEPS, Case, deepspeed_config
from stepcheck.accept.models import LENGTH, VOCABULARY, build_model
from stepcheck.accept.train import build_optimizer, build_schedule, loss_of_batch
from stepcheck.attach import AutoAudit
from stepcheck.engines.deepspeed import free
from stepcheck.engines.deepspeed_step import wrong_scale
from stepcheck.lightning.case import QUIET
from stepcheck.strategies import ZERO

Loss = Callable[[tuple[Tensor, Tensor], nn.Module], Tensor]
"""Takes a micro-batch (tokens and targets) and the model. Returns the loss."""

Train = Callable[[Case, nn.Module, Loss, torch.device, Path], Any]
"""Trains a case, and returns the model as the framework has wrapped it."""


def _train_case(train: Train, fields: dict[str, Any], device: torch.device, folder: Path) -> dict[str, Any]:
    """Trains a case on this rank. Returns as plain data the verdict of the audit, or the one that says why it was
    refused. Adds a fault if a loss is not divided by the number of micro-batches exactly once."""
    case = Case(**fields)
    auto_audit = _auto_audit(str(folder))
    auto_audit.verdicts.clear()
    auto_audit.refused.clear()
    model = build_model(case)
    torch.manual_seed(1000 * case.seed + dist.get_rank())  # dropout
    factors: list[Tensor] = []  # by which the framework and the engine together scale each loss

    def loss_of(batch: tuple[Tensor, Tensor], model: nn.Module) -> Tensor:
        loss = loss_of_batch(case, batch, model)
        loss.register_hook(factors.append)
        return loss

    trained = train(case, model, loss_of, device, folder)
    if case.strategy in ZERO:
        free(trained)
    del model, trained
    gc.collect()
    if auto_audit.refused:
        return auto_audit.refused[0][1].as_dict()
    [verdict] = auto_audit.verdicts
    # Each loss must be divided by the number of micro-batches exactly once.
    parts = case.accumulate
    for number, factor in enumerate(factors):
        if float(factor) != 1 / parts:
            text = wrong_scale(number % parts + 1, factor, 1 / parts)
            verdict.add(number // parts + 1, "loss", math.inf, text)
            break
    return verdict.as_dict()


@cache
def _auto_audit(folder: str) -> AutoAudit:
    """Starts to audit every engine and optimizer that this process builds from now on. Starts nothing if called
    again."""
    auto_audit = AutoAudit(folder, weights_every=1, keep_going=True)
    auto_audit.patch_torch(torch)
    auto_audit.patch_deepspeed(deepspeed)
    return auto_audit


def _lightning(case: Case, model: nn.Module, loss_of: Loss, device: torch.device, folder: Path) -> Any:
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    from stepcheck.lightning.strategy import CPUDeepSpeedStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any) -> Any:
            return loss_of(batch, self.model)

        def configure_optimizers(self) -> Any:
            optimizer = build_optimizer(case, self)
            return [optimizer], [{"scheduler": build_schedule(optimizer), "interval": "step"}]

    zero = case.strategy in ZERO
    config = deepspeed_config(case) if zero else {}
    for key in ("gradient_accumulation_steps", "gradient_clipping"):  # Lightning sets them itself
        config.pop(key, None)
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=case.ranks,
        strategy=CPUDeepSpeedStrategy(config=config) if zero else DDPStrategy(find_unused_parameters=True),
        plugins=LightningEnvironment(),
        precision="bf16-true" if case.precision == "bfloat16" else "32-true",
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip or None,
        max_steps=STEPS,
        default_root_dir=folder,
        **QUIET,
    )
    trainer.fit(Module(), DataLoader(_data(case), batch_size=MICRO_BATCH))
    return trainer.strategy.model


def _accelerate(case: Case, model: nn.Module, loss_of: Loss, device: torch.device, folder: Path) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin, DistributedDataParallelKwargs  # pyright: ignore[reportMissingImports]

    zero = case.strategy in ZERO
    _reset_accelerator()
    accelerator = Accelerator(
        cpu=device.type == "cpu" and not zero,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=deepspeed_config(case)) if zero else None,
        mixed_precision="bf16" if case.precision == "bfloat16" else "no",
        gradient_accumulation_steps=case.accumulate,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    optimizer = build_optimizer(case, model)
    prepared: Any = accelerator.prepare(
        model, optimizer, DataLoader(_data(case), batch_size=MICRO_BATCH), build_schedule(optimizer)
    )
    model, optimizer, batches, schedule = prepared
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(tuple(batch), model))
            if case.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model


def _transformers(case: Case, model: nn.Module, loss_of: Loss, device: torch.device, folder: Path) -> Any:
    from transformers import Trainer, TrainingArguments  # pyright: ignore[reportMissingImports]

    class OwnOptimizer(Trainer):
        """Builds the optimizer itself, because with DeepSpeed the Trainer drops the one that it is given (transformers
        5.24, issue 38753)."""

        def create_optimizer(self, *_: Any) -> Any:
            self.optimizer = build_optimizer(case, trained)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = build_schedule(optimizer or self.optimizer)
            return self.lr_scheduler

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Any, labels: Any) -> dict[str, Any]:
            return {"loss": loss_of((tokens, labels), self.model)}

    zero = case.strategy in ZERO
    _reset_accelerator()
    arguments = TrainingArguments(
        str(folder),
        use_cpu=device.type == "cpu" and not zero,
        deepspeed=deepspeed_config(case) if zero else None,
        bf16=case.precision == "bfloat16",
        gradient_accumulation_steps=case.accumulate,
        max_grad_norm=case.clip,
        max_steps=STEPS,
        per_device_train_batch_size=MICRO_BATCH,
        ddp_find_unused_parameters=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trained = WithLoss()
    trainer = OwnOptimizer(
        trained,
        arguments,
        data_collator=lambda rows: dict(zip(("tokens", "labels"), default_collate(rows), strict=True)),
        train_dataset=_data(case),
    )
    trainer.train()
    return trainer.model_wrapped


train_through_lightning = partial(_train_case, _lightning)
train_through_accelerate = partial(_train_case, _accelerate)
train_through_transformers = partial(_train_case, _transformers)


def _data(case: Case) -> TensorDataset:
    """Returns random tokens for all ranks and steps, int64 (rows, LENGTH), and as targets the next token at each
    position, in the same shape."""
    draw = torch.Generator().manual_seed(case.seed)
    rows = STEPS * case.accumulate * MICRO_BATCH * case.ranks
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=draw)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _reset_accelerator() -> None:
    from accelerate.state import AcceleratorState  # pyright: ignore[reportMissingImports]

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
