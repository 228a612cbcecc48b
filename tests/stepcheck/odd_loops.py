"""Healthy training scripts that know nothing of stepcheck, each with a habit that an audit may mistake for a fault.

`odd_loops.py NAME ...` runs those of one process one after the other, `torchrun odd_loops.py NAME ...` those of several
ranks. Each line printed is the name of a script and its losses.
"""

import copy
import io
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

STEPS = 4


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    for _ in range(STEPS):
        yield torch.randn(8, 16, generator=draw), torch.randint(0, 4, (8,), generator=draw)


def network() -> Any:
    return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 4))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def fit(
    model: Any,
    optimizer: torch.optim.Optimizer,
    before_step: Callable[[], Any] = lambda: None,
    after_step: Callable[[int], Any] = lambda step: None,
    change: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> list[float]:
    """Trains, calls the functions around each optimizer step, and returns the losses, which `change` has changed."""
    losses = []
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = change(F.cross_entropy(model(x), y))
        loss.backward()
        before_step()
        optimizer.step()
        after_step(step)
        losses.append(float(loss))
    return losses


def closure() -> list[float]:
    """Computes the gradients within the step, as Lightning does."""
    model = network()
    optimizer = adam(model)
    losses = []
    for x, y in batches():

        def compute(x: Tensor = x, y: Tensor = y) -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return float(loss)

        losses.append(optimizer.step(compute))
    return losses


def several_closures() -> list[float]:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    (x, y), *_ = batches()

    def compute() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return [float(optimizer.step(compute)) for _ in range(STEPS)]


def failed_step() -> list[float]:
    """Catches the error of an update and of a closure, and trains on."""
    model = network()
    optimizer = FailsOnce(model.parameters(), lr=1e-2)
    losses = []
    for number, (x, y) in enumerate(batches()):

        def compute(x: Tensor = x, y: Tensor = y, fails: bool = number == 1) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if fails:
                raise ValueError("the closure has failed")
            return loss

        with suppress(ValueError):
            losses.append(float(optimizer.step(compute)))
    return losses


def failed_update() -> list[float]:
    """Catches errors of updates that were given gradients. Leaves the first batch out, and retries the third step."""
    model = network()
    optimizer = FailsOnce(model.parameters(), lr=1e-2)

    def fail(step: int) -> None:
        optimizer.fails = step == 1

    def retry() -> None:
        if optimizer.fails:
            with suppress(ValueError):
                optimizer.step()

    with suppress(ValueError):
        fit(model, optimizer)
    return fit(model, optimizer, retry, fail)


class FailsOnce(torch.optim.AdamW):
    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise ValueError("the update has failed")
        return super().step(closure)


def failed_backward() -> list[float]:
    """Catches the error of a backward pass, and trains on."""
    model = network()
    optimizer = adam(model)

    def fail(gradient: Tensor) -> None:
        raise ValueError("the backward pass has failed")

    losses = fit(model, optimizer)
    optimizer.zero_grad()
    handle = model[0].weight.register_hook(fail)
    with suppress(ValueError):
        model(torch.ones(2, 16)).sum().backward()
    handle.remove()
    return losses + fit(model, optimizer)


def left_out_step() -> list[float]:
    """Leaves the step of a batch out. The next batch does not use the last layer."""
    model = network()
    optimizer = adam(model)
    model(torch.ones(2, 16)).sum().backward()
    return fit(lambda x: model[0](x)[:, :4], optimizer)


def validated_with_gradients() -> list[float]:
    """Validates in evaluation mode without no_grad after each step, and computes the gradient of an input."""
    model = network()

    def validate(step: int) -> None:
        model.eval()
        model(torch.ones(2, 16, requires_grad=True)).sum().backward()
        model.train()

    return fit(model, adam(model), after_step=validate)


def captured_gradients() -> list[float]:
    """Computes gradients that go into no parameter, before and after the backward pass."""
    model = network()

    def capture(loss: Tensor) -> Tensor:
        grad(loss, [model[2].weight], retain_graph=True)
        return loss

    return fit(model, adam(model), lambda: grad(model(torch.ones(2, 16)).sum(), [*model.parameters()]), change=capture)


def clipped_with_another() -> list[float]:
    """Clips the gradients of two optimizers together, once for each."""
    model = network()
    other = torch.optim.SGD(model[0].parameters(), lr=0.1)
    both = torch.optim.AdamW(model[2].parameters(), lr=1e-2)

    def clip() -> None:
        clip_grad_norm_(model.parameters(), 0.01)
        other.step()
        clip_grad_norm_(model.parameters(), 0.005)
        other.zero_grad()

    return fit(model, both, clip)


def switched_statistics() -> list[float]:
    model: Any = nn.Sequential(nn.Linear(16, 33), nn.BatchNorm1d(33), nn.Linear(33, 4))

    def switch() -> None:
        model[1].track_running_stats ^= True

    return fit(model, adam(model), switch)


def low_precision_and_fused() -> list[float]:
    """Has weights in bfloat16 and in float32, which torch's fused AdamW updates."""
    model = network()
    low = torch.nn.Parameter(torch.ones(33, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([low, *model.parameters()], lr=1e-2, fused=True)
    return fit(lambda x: model[2](model[0](x) * low.float()), optimizer)


def traced() -> list[float]:
    model = network()
    optimizer = adam(model)
    return fit(model, optimizer, after_step=lambda step: torch.jit.trace(model, torch.ones(2, 16)))


def scaled_loss() -> list[float]:
    """Scales the loss, clips, and leaves two steps out because they overflow."""
    model = network()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(4 * loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    return losses


def clipped_before_unscaled() -> list[float]:
    """Clips gradients that have the loss scale, by mistake."""
    model = network()
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=3.0)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    return losses


def halved_unseen() -> list[float]:
    """Changes gradients without a trace in their versions, as an engine can that divides them once too often."""
    model = network()
    return fit(model, adam(model), lambda: [each.grad.data.mul_(0.5) for each in model.parameters()])


def removed_gradients() -> list[float]:
    """Keeps a layer by removing its gradients."""
    model = network()
    return fit(model, adam(model), lambda: model[2].zero_grad())


def clipped_by_value() -> list[float]:
    model = network()
    return fit(model, adam(model), lambda: clip_grad_value_(model.parameters(), 1e-3))


def own_gradients() -> list[float]:
    """Sets gradients that autograd has not accumulated, computed by torch.func."""
    model = network()
    optimizer = adam(model)

    def loss_of(weights: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    losses = []
    for x, y in batches():
        weights = {name: each.detach() for name, each in model.named_parameters()}
        gradients, loss = torch.func.grad_and_value(loss_of)(weights, x, y)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
        losses.append(float(loss))
    return losses


def late_hooks() -> list[float]:
    """Registers hooks that change gradients after the first step."""
    model = network()

    def register(step: int) -> None:
        for parameter in model.parameters() if step == 0 else ():
            parameter.register_hook(lambda gradient: 2 * gradient)

    return fit(model, adam(model), after_step=register)


def fit_in_two_passes(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Perturbs the weights between two passes of a step, as sharpness-aware minimization does."""
    losses = []
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        moves = [1e-3 * parameter.grad for parameter in model.parameters()]
        for sign in (1, -1):
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.add_(sign * move)
            if sign == 1:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def two_passes() -> list[float]:
    model = network()
    return fit_in_two_passes(model, adam(model))


def bounded_weights() -> list[float]:
    model = network()

    def bound(step: int) -> None:
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)

    return fit(model, adam(model), after_step=bound)


def reset_optimizer() -> list[float]:
    model = network()
    optimizer = adam(model)

    def reset(step: int) -> None:
        if step == 1:
            optimizer.state.clear()
        for state in optimizer.state.values():
            state["exp_avg"].zero_()

    return fit(model, optimizer, after_step=reset)


def rebuilt_optimizer() -> list[float]:
    """Builds the optimizer again in the middle of the training, and once more before its first step."""
    model = network()
    losses = fit(model, adam(model))
    optimizer = adam(model)
    model(torch.ones(2, 16))
    optimizer = adam(model)
    return losses + fit(model, optimizer)


class Wrapper(torch.optim.Optimizer):
    """Has the parameter groups of another optimizer, as usual implementations of sharpness-aware minimization do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.base = adam(model)
        self.param_groups = self.base.param_groups


def wrapped_optimizer() -> list[float]:
    """Calls only the step of the inner one of two optimizers."""
    model = network()
    outer = Wrapper(model)
    return fit_in_two_passes(model, outer.base)


def hooks_of_the_optimizer() -> list[float]:
    """Clips weights after an update, and from the second step on gradients before it."""
    model = network()
    optimizer = adam(model)

    @torch.no_grad()
    def bound(*_: Any) -> None:
        model[0].weight.clamp_(-0.1, 0.1)

    def clip(*_: Any) -> None:
        clip_grad_norm_(model.parameters(), 0.01)

    def register(step: int) -> None:
        if step == 0:
            optimizer.register_step_pre_hook(clip)

    optimizer.register_step_post_hook(bound)
    return fit(model, optimizer, after_step=register)


def several_modules() -> list[float]:
    """One optimizer over two modules and a tensor."""
    first, last, scale = nn.Linear(16, 33), nn.Linear(33, 4), torch.ones((), requires_grad=True)
    optimizer = torch.optim.AdamW([*first.parameters(), *last.parameters(), scale], lr=1e-2)
    return fit(lambda x: scale * last(first(x).relu()), optimizer)


def fine_tuned_in_evaluation_mode() -> list[float]:
    model = network().eval()
    return fit(model, adam(model))


def copied() -> list[float]:
    """Copies and pickles the model while it trains, and uses the copies."""
    model = network()
    optimizer = adam(model)

    def use_copies(step: int) -> None:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            other(torch.ones(2, 16)).sum().backward()

    return fit(model, optimizer, after_step=use_copies)


def resumed() -> list[float]:
    """Loads the state of the optimizer and of a layer of an earlier step."""
    model = network()
    optimizer = adam(model)
    kept: list[Any] = []

    def resume(step: int) -> None:
        if step == 0:
            kept.extend(copy.deepcopy([optimizer.state_dict(), model[0].state_dict()]))
        if step == 2:
            optimizer.load_state_dict(kept[0])
            model[0].load_state_dict(kept[1])

    return fit(model, optimizer, after_step=resume)


def unfrozen() -> list[float]:
    model = network()
    model[0].requires_grad_(False)
    return fit(model, adam(model), after_step=lambda step: model[0].requires_grad_(step > 0))


def grown() -> list[float]:
    """Gives the optimizer a layer after the first step."""
    model = network()
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)

    def grow(step: int) -> None:
        if step == 0:
            optimizer.add_param_group({"params": [*model[0].parameters()]})

    return fit(model, optimizer, after_step=grow)


class Unusual(nn.Module):
    """Has sparse gradients, and complex and float64 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16, sparse=True)
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.cfloat))
        self.head = nn.Linear(16, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.embedding((8 * x[:, 0]).long() % 64)
        return self.head(torch.fft.irfft(self.filter * torch.fft.rfft(x)).double())


def unusual_tensors() -> list[float]:
    model = Unusual()
    return fit(model, torch.optim.SGD(model.parameters(), lr=0.1))


def compiled() -> list[float]:
    """Compiles a function that calls the model, which no hook may break."""
    model: Any = nn.Sequential(network(), nn.BatchNorm1d(4))
    return fit(torch.compile(lambda x: model(x), backend="eager", fullgraph=True), adam(model))


def compiled_step() -> list[float]:
    model = network()
    optimizer = adam(model)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return fit(model, optimizer)


def forked() -> list[float]:
    """Trains in a process that ends without atexit."""
    process = multiprocessing.get_context("fork").Process(target=fine_tuned_in_evaluation_mode)
    process.start()
    process.join()
    return [float(process.exitcode or 0)]


def wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **options)


def one_optimizer_for_two_wrappers() -> list[float]:
    first, last = wrapped(nn.Linear(16, 33)), wrapped(nn.Linear(33, 4))
    return fit(lambda x: last(first(x).relu()), torch.optim.AdamW([*first.parameters(), *last.parameters()], lr=1e-2))


class Recomputed(nn.Module):
    """Has all its trained weights in reentrant checkpoints, each of which runs a backward pass within another one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def recomputed_in_views_of_buckets() -> list[float]:
    """DDP averages the gradients of a block in place before autograd has computed those of the next block."""
    model = wrapped(Recomputed(), gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
    return fit(model, torch.optim.SGD(model.parameters(), lr=0.1))


def uneven_inputs() -> list[float]:
    """One rank has no batches."""
    model = wrapped(network())
    optimizer = adam(model)
    with model.join():
        return fit(model, optimizer) if dist.get_rank() else []


def groups_of_one_rank() -> list[float]:
    """Each rank trains on its own, and one rank a little longer."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = wrapped(network(), process_group=groups[dist.get_rank()])
    optimizer = adam(model)
    return fit(model, optimizer) + (fit(model, optimizer) if dist.get_rank() else [])


def sharded_optimizer() -> list[float]:
    """The optimizers of the ranks update different parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = wrapped(network())
    return fit(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2))


def sharded_and_clipped_by_value() -> list[float]:
    """Clips DTensors, whose versions do not show it."""
    model = fully_shard(network())
    return fit(model, adam(model), lambda: clip_grad_value_(model.parameters(), 1e-3))


def divided_by_different_factors() -> list[float]:
    model = network()
    for part in (model[0], model[2], model):
        fully_shard(part).set_force_sum_reduction_for_comms(True)  # Gloo cannot multiply
    model[0].set_gradient_divide_factor(3.0)
    return fit(model, adam(model))


def sharded_two_passes() -> list[float]:
    model = fully_shard(network())
    return fit_in_two_passes(model, adam(model))


def sharded_and_changed_between_passes() -> list[float]:
    """Discards the gradients of a first pass, and clips after each of two micro-batches. The versions of DTensors show
    neither."""
    model = fully_shard(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for x, y in batches():
        F.cross_entropy(model(x), y).backward()
        optimizer.zero_grad(set_to_none=False)
        for part in (slice(4), slice(4, 8)):
            loss = F.cross_entropy(model(x[part]), y[part]) / 2
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(float(loss))
    return losses


def fit_with_two_micro_batches(model: Any, reduce: Callable[[bool], None]) -> list[float]:
    optimizer = adam(model)
    losses = []
    for x, y in batches():
        for part in (slice(4), slice(4, 8)):
            reduce(part.stop == 8)
            loss = F.cross_entropy(model(x[part]), y[part]) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def reduced_in_the_last_pass() -> list[float]:
    model = fully_shard(network())
    return fit_with_two_micro_batches(model, model.set_requires_gradient_sync)


def reduced_over_replicas_in_the_last_pass() -> list[float]:
    """Accumulates gradients that are reduced over the shards only."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(network(), mesh=mesh)
    return fit_with_two_micro_batches(model, model.set_requires_all_reduce)


def sharded_in_groups_of_one_rank() -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("stage", "shard"))
    model = fully_shard(network(), mesh=mesh["shard"])
    return fit(model, adam(model))


def compressed_small_gradients() -> list[float]:
    """Sends gradients in float16 that are below its smallest normal number."""
    model = wrapped(network())
    model.register_comm_hook(None, fp16_compress_hook)
    return fit(model, adam(model), change=lambda loss: 1e-4 * loss)


def layer_of_one_rank() -> list[float]:
    """Averages gradients after each of two micro-batches. In the second one, only rank 0 uses all layers."""
    model = wrapped(OptionalLayer(), find_unused_parameters=True)
    optimizer = adam(model)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        for uses_all in (True, dist.get_rank() == 0):
            loss = F.cross_entropy(model(x, uses_all), y) / 2
            loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


class OptionalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        return self.last(self.first(x) if uses_all else x)


def probe_of_one_rank() -> list[float]:
    model = wrapped(network())
    losses = fit(model, adam(model))
    if dist.get_rank() == 0:
        probe = nn.Linear(16, 4)
        losses += fit(probe, adam(probe))
    return losses


def main() -> None:
    """Runs the scripts that the command line names."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        torch.manual_seed(0)
        losses = globals()[name]()
        if distributed:
            dist.barrier()
        if not distributed or dist.get_rank() == 0:
            print(name, *(loss.hex() for loss in losses), flush=True)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
