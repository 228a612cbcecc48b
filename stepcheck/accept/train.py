"""Trains one case on this rank, and audits each step."""

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from stepcheck.accept.cases import STEPS, Case, deepspeed_config
from stepcheck.accept.models import batches, build_model, cross_entropy
from stepcheck.auditor import audit
from stepcheck.baseline import AuditBaseline, Baseline
from stepcheck.replay import Replay
from stepcheck.start import Start
from stepcheck.strategies import ZERO
from stepcheck.verdict import Verdict


def train_case(
    fields: dict[str, Any], device: torch.device, folder: Path, baseline: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Trains a case on this rank. Returns the audit's verdict as plain data.

    Args:
        fields: Fields of the Case.
        folder: Not used.
        baseline: Arguments of the `Baseline` to which the steps are added or with which they are compared.
    """
    case = Case(**fields)
    steps = _baseline(**baseline) if baseline else None
    verdict = train(case, device, steps and steps.audit(str(case)))
    if steps is not None and dist.get_rank() == 0:
        steps.write()
    return verdict.as_dict()


@cache
def _baseline(**arguments: Any) -> Baseline:
    return Baseline(**arguments)


@dataclass(frozen=True)
class Training:
    """What a loop needs to train a case."""

    model: Any  # the engine or the wrapper
    optimizer: torch.optim.Optimizer
    schedule: Any
    start: Start
    set_sync: Callable[[bool], Any]  # whether DDP or FSDP2 averages the gradients of the next backward pass


def train(case: Case, device: torch.device, baseline: AuditBaseline | None = None) -> Verdict:
    model = build_model(case).to(device)
    torch.manual_seed(1000 * case.seed + dist.get_rank())  # dropout
    replay = Replay(copy.deepcopy(model))
    training = _start(case, model)
    data = batches(case, dist.get_rank(), device)
    audited = audit(
        training.model,
        training.optimizer,
        weights_every=1,
        on_fault="warn",
        start=training.start,
        replay=replay,
        baseline=baseline,
    )
    with audited:
        for number in range(1, STEPS * case.accumulate + 1):
            is_last = number % case.accumulate == 0
            compute = partial(loss_of_batch, case, next(data))
            training.set_sync(case.syncs_each or is_last)
            replay.micro_batch(compute)
            loss = compute(training.model)
            replay.loss(loss)
            _backward(case, training, loss, is_last)
    if case.strategy in ZERO:
        from stepcheck.engines.deepspeed import free

        free(training.model)
    del training, model
    gc.collect()
    gc.freeze()  # what lives now need not be searched after the next case
    return audited.verdict


def _start(case: Case, model: Any) -> Training:
    if case.strategy in ZERO:
        import deepspeed

        optimizer = build_optimizer(case, model)
        schedule, start = build_schedule(optimizer), Start(model, optimizer)
        engine = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=deepspeed_config(case)
        )[0]
        return Training(engine, optimizer, schedule, start, lambda _: None)  # the engine counts micro-batches
    low = torch.bfloat16 if case.precision == "bfloat16" else None
    if case.strategy == "ddp":
        for parameter in model.parameters() if low else ():
            parameter.data = parameter.to(low)
        optimizer = build_optimizer(case, model)
        start = Start(model, optimizer)
        model = DistributedDataParallel(model, find_unused_parameters=True)
        set_sync: Callable[[bool], Any] = partial(setattr, model, "require_backward_grad_sync")
    else:
        start = Start(model)
        fully_shard(model.block, mp_policy=MixedPrecisionPolicy(low))
        model = fully_shard(model, mp_policy=MixedPrecisionPolicy(low))
        set_sync = model.set_requires_gradient_sync
        optimizer = build_optimizer(case, model)
    return Training(model, optimizer, build_schedule(optimizer), start, set_sync)


def _backward(case: Case, training: Training, loss: Tensor, is_last: bool) -> None:
    """Computes gradients, and at the last micro-batch updates the weights."""
    model = training.model
    if case.strategy in ZERO and not case.plain_backward:
        model.backward(loss)
    else:
        loss.backward()
    if case.strategy in ZERO:
        if is_last or case.config.get("managed_gradient_accumulation", True):
            model.step()
    elif is_last:
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        training.optimizer.step()
        training.schedule.step()
        training.optimizer.zero_grad()


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
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.85)


def loss_of_batch(case: Case, batch: tuple[Tensor, Tensor], model: nn.Module) -> Tensor:
    """Returns the loss that a training passes to the backward pass, divided by the number of micro-batches unless
    DeepSpeed's engine divides it."""
    loss = model(*batch) if case.model == "experts" else cross_entropy(model(batch[0]), batch[1])
    return loss if case.strategy in ZERO else loss / case.accumulate
