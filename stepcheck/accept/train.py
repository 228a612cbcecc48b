"""Trains one case on this rank, and audits each step."""

import copy
import gc
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from stepcheck.accept.cases import STEPS, Case, deepspeed_config
from stepcheck.accept.models import batches, build, cross_entropy
from stepcheck.auditor import audit
from stepcheck.baseline import AuditBaseline, Baseline
from stepcheck.replay import Replay
from stepcheck.start import Start
from stepcheck.strategies import ZERO
from stepcheck.verdict import Verdict


def train_case(
    fields: dict[str, Any], device: torch.device, folder: Path, baseline: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Trains a case on this rank, and adds its steps to a baseline or compares them. Returns the audit's verdict as
    plain data."""
    case = Case(**fields)
    steps = _baseline(**baseline) if baseline else None
    verdict = train(case, device, steps and steps.audit(str(case)))
    if steps is not None and dist.get_rank() == 0:
        steps.write()
    return verdict.as_dict()


@cache
def _baseline(**arguments: Any) -> Baseline:
    """Returns the baseline of all cases of this process, which reads its file once."""
    return Baseline(**arguments)


def train(case: Case, device: torch.device, baseline: AuditBaseline | None = None) -> Verdict:
    """Trains a case. Returns the audit's verdict."""
    model = build(case).to(device)
    torch.manual_seed(1000 * case.seed + dist.get_rank())  # dropout
    replay = Replay(copy.deepcopy(model))
    training = (DeepSpeedTraining if case.strategy in ZERO else TorchTraining)(case, model)
    data = batches(case, dist.get_rank(), device)
    try:
        with audit(
            *training.audited,
            weights_every=1,
            on_fault="warn",
            start=training.start,
            replay=replay,
            baseline=baseline,
        ) as audited:
            for number in range(1, STEPS * case.accumulate + 1):
                compute = partial(loss_of_batch, case, next(data))
                training.prepare(is_last=number % case.accumulate == 0)
                replay.micro_batch(compute)
                loss = compute(training.model)
                replay.loss(loss)
                training.backward(loss, is_last=number % case.accumulate == 0)
    finally:
        training.free()
        del training, model
        gc.collect()
        gc.freeze()  # what lives now need not be searched after the next case
    return audited.verdict


class TorchTraining:
    """Trains a case under DistributedDataParallel or FSDP2."""

    def __init__(self, case: Case, model: Any):
        self.case = case
        self.model: Any
        if case.strategy == "ddp":
            for parameter in model.parameters() if case.precision == "bfloat16" else ():
                parameter.data = parameter.to(torch.bfloat16)
            optimizer = build_optimizer(case, model)
            self.start = Start(model, optimizer)
            self.model = DistributedDataParallel(model, find_unused_parameters=True)
            self.set_sync: Callable[[bool], Any] = partial(setattr, self.model, "require_backward_grad_sync")
        else:
            self.start = Start(model)
            precision = MixedPrecisionPolicy(torch.bfloat16 if case.precision == "bfloat16" else None)
            fully_shard(model.block, mp_policy=precision)
            self.model = fully_shard(model, mp_policy=precision)
            self.set_sync = self.model.set_requires_gradient_sync
            optimizer = build_optimizer(case, model)
        self.optimizer, self.schedule = optimizer, build_schedule(optimizer)
        self.audited: Any = self.model, optimizer

    def prepare(self, is_last: bool) -> None:
        """Decides whether the next backward pass averages the gradients."""
        self.set_sync(self.case.syncs_each or is_last)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Computes gradients, and at the last micro-batch updates the weights."""
        loss.backward()
        if not is_last:
            return
        if self.case.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.case.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def free(self) -> None:
        """Does nothing, because no references outlive the training."""


class DeepSpeedTraining:
    """Trains a case with DeepSpeed's engine."""

    def __init__(self, case: Case, model: nn.Module):
        import deepspeed

        self.case = case
        optimizer = build_optimizer(case, model)
        self.start = Start(model, optimizer)
        self.model: Any = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=build_schedule(optimizer), config=deepspeed_config(case)
        )[0]
        self.audited: Any = (self.model,)
        self.managed = case.config.get("managed_gradient_accumulation", True)

    def prepare(self, is_last: bool) -> None:
        """Does nothing: the engine counts micro-batches."""

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Computes gradients, and calls the engine's step."""
        if self.case.plain_backward:
            loss.backward()
        else:
            self.model.backward(loss)
        if self.managed or is_last:
            self.model.step()

    def free(self) -> None:
        """Destroys the engine, which would otherwise keep its tensors and hooks."""
        from stepcheck.engines.deepspeed import free

        free(self.model)


def build_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of a case. Only matrices have weight decay, and experts are in separate parameter
    groups."""
    trained = [each for each in model.parameters() if each.requires_grad]
    matrices, vectors = ([each for each in trained if (each.dim() > 1) == matrix] for matrix in (True, False))
    groups: Any = [
        {"name": "matrices", "params": matrices},
        {"name": "vectors", "params": vectors, "weight_decay": 0.0},
    ]
    if case.model == "experts":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    return getattr(torch.optim, case.optimizer)(groups, **case.options)


def build_schedule(optimizer: torch.optim.Optimizer) -> Any:
    """Returns a schedule with a different learning rate in each step."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.85)


def loss_of_batch(case: Case, batch: tuple[Tensor, Tensor], model: nn.Module) -> Tensor:
    """Returns the loss that a training passes to the backward pass, divided by the number of micro-batches unless
    DeepSpeed's engine divides it. The model with experts returns its loss itself."""
    loss = model(*batch) if case.model == "experts" else cross_entropy(model(batch[0]), batch[1])
    return loss if case.strategy in ZERO else loss / case.accumulate
