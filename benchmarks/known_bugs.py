"""Reproduces silent bugs of DeepSpeed that upstream knows, each under the audit, and prints a line for each. The
docstring of a case begins with the number of DeepSpeed's issue or pull request.

DS_ACCELERATOR=cpu TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 python -m benchmarks.known_bugs [CASE ...]

starts two CPU ranks. To run another release, put its folder first on PYTHONPATH. benchmarks/results/deepspeed_bugs.md
has the results.
"""

import math
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stepcheck import NotAuditable, audit


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Rotary(nn.Module):
    """A layer with a float32 buffer that bfloat16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("angles", torch.full((8,), 1.001))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.angles.to(x.dtype)


def build(model: nn.Module, config: dict[str, Any], optimizer: Any = None) -> Any:
    """Returns an engine with micro-batches of size 1 and without gradient clipping. The entries of `config` replace
    these options."""
    common = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    parameters = None if optimizer else list(model.parameters())
    initialize: Any = deepspeed.initialize  # its annotations are narrower than what it accepts
    engine, *_ = initialize(model=model, optimizer=optimizer, model_parameters=parameters, config={**common, **config})
    return engine


def train(engine: Any, steps: list[list[Tensor]], inspect: Callable[[], Any] | None = None) -> str:
    """Trains an engine under the audit. `steps` has a list of micro-batches for each step, and `inspect` is called
    after each step. Returns the verdict as a text, with its first finding."""
    with audit(engine, on_fault="warn", weights_every=1) as audited:
        for step in steps:
            for images in step:
                engine.backward(engine(images).float().square().mean())
                engine.step()
            if inspect:
                inspect()
    verdict = audited.verdict
    findings = "; ".join(str(each) for each in verdict.findings[:1])
    others = "; ".join(f"{what}: {why}" for what, why in [*verdict.not_judged.items(), *verdict.notes.items()])
    return f"{verdict.outcome}, {verdict.steps} steps, {verdict.skipped} skipped. {findings} {others}"


def weights(engine: Any) -> Tensor:
    """Returns all weights as one vector, float64. At ZeRO 3 every rank must call it."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=engine.zero_optimization_stage() == 3):
        return torch.cat([each.detach().double().flatten() for each in parameters])


def images(count: int, rows: int, seed: int = 0) -> list[Tensor]:
    """Returns `count` micro-batches of this rank, each float32 (rows, 8). The other rank gets different ones."""
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return [torch.randn(rows, 8, generator=generator) for _ in range(count)]


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


def muon(stage: int) -> str:
    """8441: at ZeRO 0 the update of Muon is the update of SGD."""
    model = two_layers()
    before, copy = torch.cat([each.detach().double().flatten() for each in model.parameters()]), two_layers()
    batch = images(1, 8)
    copy(batch[0]).square().mean().backward()
    gradient = torch.cat([each.grad.flatten() for each in copy.parameters()])  # pyright: ignore[reportOptionalMemberAccess]
    dist.all_reduce(gradient)
    engine = build(model, {**zero(stage), "optimizer": {"type": "Muon", "params": {"lr": 0.02}}})
    verdict = train(engine, [batch])
    moved, sgd = weights(engine) - before, -0.02 * gradient.double() / dist.get_world_size()
    return f"distance to the update of SGD: {float((moved - sgd).norm() / sgd.norm()):.2g} of its norm. {verdict}"


def muon_accumulated(stage: int) -> str:
    """8443: ZeRO 3 applies Muon to each micro-batch instead of to each step."""
    results, verdicts = [], []
    for parts in (1, 4):
        batches = [torch.cat(images(4, 2, seed)).chunk(parts) for seed in range(3)]
        config = {**zero(stage), "optimizer": {"type": "Muon", "params": {"lr": 0.02}}}
        engine = build(two_layers(), {**config, "gradient_accumulation_steps": parts})
        verdicts.append(train(engine, [list(each) for each in batches]))
        results.append(weights(engine))
    return f"4 micro-batches instead of 1: weights differ by {difference(*results):.2g}. {verdicts[-1]}"


def muon_init() -> str:
    """8438: under zero.Init no parameter is trained by Muon."""
    config = {**zero(3), "optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "train_micro_batch_size_per_gpu": 1}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = two_layers()
    engine = build(model, config)
    by_muon = sum(getattr(each, "use_muon", False) for each in engine.module.parameters())
    return f"{by_muon} of 2 matrices are trained by Muon. {train(engine, [images(1, 8)])}"


def not_finite(stage: int, bf16: bool) -> str:
    """8415: a gradient that is not finite skips the step without a message."""
    model = two_layers()
    engine = build(model, {**zero(stage), "bf16": {"enabled": bf16}}, torch.optim.SGD(model.parameters(), lr=0.1))
    dtype = torch.bfloat16 if bf16 else torch.float32
    bad = [[torch.full((1, 8), math.inf, dtype=dtype)]]
    verdict = train(engine, [[images(1, 1)[0].to(dtype)], *bad, *bad])
    return f"weights finite: {bool(weights(engine).isfinite().all())}. {verdict}"


def buffers() -> str:
    """8066: the engine casts float32 buffers to the low precision."""
    model = Rotary()
    engine = build(model, {**zero(2), "bf16": {"enabled": True}}, torch.optim.SGD(model.parameters(), lr=0.1))
    return f"the float32 buffer is {engine.module.angles.dtype}. {train(engine, [[images(1, 1)[0].bfloat16()]])}"


def warmup() -> str:
    """7303: WarmupLR without warmup_max_lr warms up to 0.001 instead of the optimizer's learning rate."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    return rates({"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}}, schedule, 4)


def one_cycle() -> str:
    """8179: OneCycle ignores cycle_first_stair_count, the number of stairs."""
    own = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.9, "cycle_first_step_size": 6, "cycle_first_stair_count": 2}
    schedule = {"type": "OneCycle", "params": {**own, "cycle_momentum": False}}
    return rates({"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}, schedule, 6)


def rates(optimizer: dict[str, Any], schedule: dict[str, Any], steps: int) -> str:
    engine = build(two_layers(), {**zero(1), "optimizer": optimizer, "scheduler": schedule})
    seen: list[float] = []
    verdict = train(engine, [images(1, 1)] * steps, lambda: seen.append(engine.get_lr()[0]))
    return f"rates {[round(each, 7) for each in seen]}. {verdict}"


def autocast(stage: int) -> str:
    """7534: with torch_autocast, ZeRO 3 reduces the gradient of a tied weight several times."""
    torch.manual_seed(0)
    model = Tied()
    config = {**zero(stage), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    engine = build(model, config, torch.optim.SGD(model.parameters(), lr=0.1))
    return train(engine, [images(1, 4)] * 3)


def secondary() -> str:
    """7707: with hpZ, a loaded checkpoint leaves the secondary shards of the weights as they were."""
    config = zero(3)
    config["zero_optimization"] |= {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    texts = []
    for loads in (False, True):
        torch.manual_seed(int(loads))
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        engine = build(model, config, torch.optim.SGD(model.parameters(), lr=0.1))
        if loads:
            train(engine, [images(1, 4)])
            engine.load_checkpoint(folder[0])
        texts.append(train(engine, [images(1, 4)] * 2))
        if not loads:
            engine.save_checkpoint(folder[0])
    return texts[-1]


def other_model(stage: int) -> str:
    """6770: the optimizer has the parameters of a copy of the model."""
    engine = build(two_layers(), zero(stage), torch.optim.SGD(two_layers().parameters(), lr=0.1))
    before = weights(engine)
    verdict = train(engine, [images(1, 4)] * 2)
    return f"the weights moved by {difference(weights(engine), before):.2g}. {verdict}"


def frozen(stage: int) -> str:
    """6771: a layer was frozen after the optimizer was built, and a checkpoint lacks its state."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    next(model.parameters()).requires_grad_(False)
    engine = build(model, zero(stage), optimizer)
    before = weights(engine)
    verdict = train(engine, [images(1, 4)] * 2)
    moved = (weights(engine) != before).view(2, -1).any(1).tolist()
    return f"the frozen and the other matrix moved: {moved}. {verdict}"


def pipeline() -> str:
    """8152: each earlier stage of a pipeline divides its gradients by the number of micro-batches once more."""
    from deepspeed.pipe import PipelineModule

    layers = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    model = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss())
    config = {"gradient_accumulation_steps": 4, "pipeline": {"activation_checkpoint_interval": 0}}
    engine = build(model, config, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        audit(engine)
        verdict = "audited"
    except NotAuditable as error:
        verdict = f"not judged: {error}"
    batches = iter([(torch.ones(1, 1), torch.zeros(1, 1))] * 4)
    engine.train_batch(data_iter=batches)
    moved = [1 - float(each) for each in engine.module.parameters()]
    all_moved: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_moved, moved)
    return f"the layers moved by {all_moved}, expected 0.2 each. {verdict}"


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_scatter": False}}


def difference(some: Tensor, others: Tensor) -> float:
    return float((some - others).norm() / others.norm())


CASES: dict[str, Callable[[], str]] = {
    **{f"muon {stage}": partial(muon, stage) for stage in range(4)},
    **{f"muon accumulated {stage}": partial(muon_accumulated, stage) for stage in (2, 3)},
    "muon init": muon_init,
    **{
        f"not finite {stage} {'bf16' if bf16 else 'float32'}": partial(not_finite, stage, bf16)
        for stage in range(4)
        for bf16 in (True, False)
    },
    "buffers": buffers,
    "warmup": warmup,
    "one cycle": one_cycle,
    **{f"autocast {stage}": partial(autocast, stage) for stage in (1, 2, 3)},
    "secondary": secondary,
    **{f"other model {stage}": partial(other_model, stage) for stage in range(4)},
    **{f"frozen {stage}": partial(frozen, stage) for stage in range(4)},
    "pipeline": pipeline,
}


def run(rank: int, folder: str, chosen: list[str]) -> None:
    """Runs the cases whose names begin with one of `chosen`, or all cases if `chosen` is empty. Both ranks call it, and
    rank 0 prints."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    deepspeed.init_distributed(verbose=False)
    for name, case in CASES.items():
        if chosen and not any(name.startswith(each) for each in chosen):
            continue
        try:
            result = case()
        except Exception as error:  # a release may not have what a case needs
            result = f"cannot run: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if rank == 0:
            print(f"DeepSpeed {deepspeed.__version__} | {name} | {result}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        other = os.fork()  # shares the imports
        run(int(other == 0), folder, sys.argv[1:])
        if other == 0:
            os._exit(0)
        os.waitpid(other, 0)


if __name__ == "__main__":
    main()
