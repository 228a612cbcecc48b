"""A training script that knows nothing of stepcheck: a small language model under one of several engines."""

import argparse
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LENGTH = 97, 48, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    """Has what has broken engines: a tied head, a frozen and an unused layer, a scalar-like weight, recomputation, odd
    sizes."""

    def __init__(self, bf16: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        # torch's batch norm on CPUs refuses weights in bfloat16 with statistics in float32, which DeepSpeed keeps.
        self.norm = nn.GroupNorm(4, WIDTH) if bf16 else nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.bias, self.unused = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.conv(self.frozen(self.embed(ids)).transpose(1, 2))).transpose(1, 2)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)  # pyright: ignore[reportAssignmentType]
        return self.head(x) * self.scale + self.bias(x)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), ids.roll(-1, 1).flatten())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="plain")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args(arguments)


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    trained = [each for each in model.parameters() if each.requires_grad]
    matrices, others = ([each for each in trained if (each.dim() > 1) == matrix] for matrix in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def deepspeed_engine(options: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    import deepspeed

    zero: dict[str, object] = {"stage": int(options.engine[-1]), "reduce_bucket_size": 30000, "overlap_comm": False}
    zero["stage3_param_persistence_threshold"] = 200
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": options.accumulate,
        "gradient_clipping": options.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "bf16": {"enabled": options.bf16},
        "zero_optimization": zero,
    }
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]


def train(options: argparse.Namespace) -> nn.Module:
    """Trains the model and returns it."""
    if options.engine != "plain" and not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = Model(options.bf16)
    if options.bf16 and not options.engine.startswith(("zero", "fsdp")):
        model.to(torch.bfloat16)
    engine: nn.Module = model
    if options.engine == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        low = torch.bfloat16 if options.bf16 else None
        precision = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
        for block in model.blocks:
            fully_shard(block, mp_policy=precision)
        fully_shard(model, mp_policy=precision)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-3)
    if options.engine.startswith("zero"):
        engine = deepspeed_engine(options, model, optimizer)
    elif options.engine == "ddp":
        engine = DistributedDataParallel(model, find_unused_parameters=True)
    data = torch.Generator().manual_seed(rank)
    torch.manual_seed(rank)  # dropout
    for _ in range(options.steps):
        for part in range(options.accumulate):
            ids = torch.randint(0, VOCABULARY, (4, LENGTH), generator=data)
            if isinstance(engine, DistributedDataParallel):
                engine.require_backward_grad_sync = part == options.accumulate - 1
            loss = loss_of(engine(ids), ids)
            if options.engine.startswith("zero"):
                engine.backward(loss)  # pyright: ignore[reportCallIssue]
                engine.step()  # pyright: ignore[reportCallIssue]
            else:
                (loss / options.accumulate).backward()
        if not options.engine.startswith("zero"):
            if options.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"loss {float(loss):.6f}")
    return engine


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    train(parse())
    if dist.is_initialized():
        dist.destroy_process_group()
