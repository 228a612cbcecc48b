"""Defines the cases: short trainings, each of which executes a certain code path of a strategy. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stepcheck.accept.release import lacks_float16, unknown
from stepcheck.strategies import ZERO, uses_gpus

STEPS = 4
"""Optimizer steps in a case. All are audited. A wrong gradient shows at the first, a stale state at the second."""

MICRO_BATCH = 4
"""Sequences in a micro-batch of a rank."""

QUICK = 3
"""Number of rows that --quick trains, from the first."""

STRATEGIES = ("ddp", "fsdp2", *ZERO)


@dataclass(frozen=True)
class Case:
    """A short training, which is sent between processes as JSON."""

    row: str
    why: str = ""  # the code path that it executes
    strategy: str = ""
    ranks: int = 1  # in ROWS, a number that must divide the number of ranks
    seed: int = 0
    model: Literal["edges", "experts"] = "edges"
    ep_size: int = 1  # ranks over which the experts are spread
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    optimizer: str = "SGD"  # a class of torch.optim. SGD does not hide a wrong scale, as Adam does
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.05, "momentum": 0.9})  # of the optimizer
    accumulate: int = 1  # micro-batches of a step on each rank
    clip: float = 0.0
    trained: tuple[str, ...] = ()  # beginnings of the names of the parameters that are trained; empty for all
    rests: Literal["between", "first", "last", "step 2"] = "between"  # when a layer is not used (models.py)
    plain_backward: bool = False  # `loss.backward()` instead of `engine.backward(loss)`
    syncs_each: bool = False  # whether DDP and FSDP2 average the gradients of each micro-batch by themselves
    config: dict[str, Any] = field(default_factory=dict)  # DeepSpeed's keys
    # Which strategies train it.
    stages: tuple[int | None, ...] = ()  # ZeRO stages, None for PyTorch; empty for all strategies
    offload: bool = True  # whether the strategies with offload too
    needs: tuple[str, ...] = ()  # what a release of DeepSpeed must have, besides the keys of the configuration

    def __str__(self) -> str:
        return f"{self.strategy}: {self.row}" + (f", seed {self.seed}" if self.seed or self.row == "random" else "")


ADAMW = {"optimizer": "AdamW", "options": {"lr": 0.005, "weight_decay": 0.5}}  # only matrices decay: two groups
CLIP = 0.1  # less than the gradient norm of each model


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


ROWS = (
    Case("float32, accumulated", "sums of micro-batches", accumulate=4),
    Case("bfloat16, accumulated", "sums in the low precision", accumulate=4, precision="bfloat16"),
    Case("bfloat16, AdamW, clipped", "master weights, decay, norm", precision="bfloat16", clip=CLIP, **ADAMW),
    Case("AdamW, clipped, accumulated", "the norm of all shards", accumulate=4, clip=CLIP, **ADAMW),
    Case(
        "several buckets",
        "a bucket that is reduced during the backward pass; a parameter larger than a bucket; the round-robin order",
        accumulate=4,
        config=zero(reduce_bucket_size=2000, round_robin_gradients=True),
        stages=(1, 2, 3),
    ),
    Case(
        "averaged one by one",
        "DDP and FSDP2: gradients averaged after each micro-batch; DDP copies buffers before each micro-batch",
        accumulate=2,
        syncs_each=True,
        stages=(None,),
    ),
    Case(
        "all parameters sharded",
        "ZeRO 3: gathering, prefetching and releasing each parameter",
        accumulate=4,
        config=zero(
            stage3_param_persistence_threshold=0,
            stage3_prefetch_bucket_size=500,
            stage3_max_live_parameters=20000,
            sub_group_size=3000,
        ),
        stages=(3,),
        **ADAMW,
    ),
    Case(
        "frozen layers",
        "weights that no optimizer updates; a batch norm in evaluation mode, whose statistics do not change",
        clip=CLIP,
        trained=("project", "twice", "bias"),
        stages=(1, 2, 3),
        offload=False,
        **ADAMW,
    ),
    Case(
        "experts",
        "a gate, experts that every rank has",
        model="experts",
        accumulate=4,
        stages=(0, 1, 2),
        **ADAMW,
    ),
    Case("experts, spread", "experts on several ranks", model="experts", ep_size=2, stages=(0, 1, 2), ranks=2),
    Case(
        "gradients not contiguous",
        "gradients that are reduced one by one (DeepSpeed pull request 8382)",
        accumulate=2,
        config=zero(contiguous_gradients=False),
        stages=(1, 2, 3),
        offload=False,
    ),
    Case(
        "gradients kept in float32",
        "another optimizer wrapper at ZeRO 1 (DeepSpeed pull request 7985)",
        accumulate=4,
        precision="bfloat16",
        config={"data_types": {"grad_accum_dtype": "fp32"}},
        stages=(1, 2, 3),
    ),
    Case(
        "fetched by all-reduce",
        "ZeRO 3: all-reduce instead of all-gather (DeepSpeed pull request 8158)",
        config=zero(stage3_param_persistence_threshold=0, stage3_use_all_reduce_for_fetch_params=True),
        stages=(3,),
        offload=False,
    ),
    Case(
        "sent in float32",
        "gradients that are sent in another precision than their own",
        accumulate=2,
        precision="bfloat16",
        config={"communication_data_type": "fp32"},
        stages=(0, 1, 2, 3),
        offload=False,
    ),
    Case(
        "summed over the ranks",
        "gradients that are summed over the ranks, not averaged",
        accumulate=2,
        config={"gradient_allreduce_op": "sum"},
        stages=(0, 1, 2),
        offload=False,
    ),
    Case(
        "divided beforehand",
        "division before the all-reduce",
        accumulate=2,
        config={"prescale_gradients": True} | zero(reduce_scatter=False),
        stages=(0, 1, 2, 3),
        offload=False,
    ),
    Case(
        "divided in two parts",
        "division before and after the all-reduce",
        accumulate=2,
        config={"gradient_predivide_factor": 4.0} | zero(reduce_scatter=False),
        stages=(0, 1, 2, 3),
        offload=False,
    ),
    Case(
        "unmanaged accumulation",
        "steps that end where the script says",
        accumulate=2,
        config={"managed_gradient_accumulation": False},
        stages=(0, 1, 2, 3),
    ),
    Case(
        "float16, clipped",
        "a loss scale that the engine multiplies and divides by",
        accumulate=2,
        precision="float16",
        clip=CLIP,
        stages=(0, 1, 2, 3),
    ),
    Case(
        "autocast",
        "layers that compute, and whose weights and gradients are sent, in a lower precision than the others",
        accumulate=2,
        clip=CLIP,
        config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        stages=(0, 1, 2, 3),
        offload=False,
    ),
    Case("a layer rests, step 2", "no gradient in a whole step", rests="step 2"),
    Case("a layer rests, first", "no gradient in the first micro-batch", rests="first", accumulate=2),
    Case("a layer rests, last", "no gradient in the last micro-batch", rests="last", accumulate=2),
    Case(
        "loss.backward()",
        "the engine's hooks in a backward pass that the script starts",
        accumulate=2,
        plain_backward=True,
        stages=(1, 2, 3),
        offload=False,
        needs=("register_grad_acc_post_hook",),
    ),
    Case(
        "weights sharded twice",
        "ZeRO 3: weights that groups of ranks keep (hpZ)",
        accumulate=2,
        config=zero(zero_hpz_partition_size=2),
        stages=(3,),
        offload=False,
        ranks=4,
    ),
)


def plan(
    strategies: Sequence[str], ranks: int, quick: bool, seeds: int, through: str
) -> tuple[list[Case], dict[str, str]]:
    """Returns the cases to train, and the reason for each row that cannot be trained, by the row's name. A row is in
    neither if no strategy trains it, or if `quick` is true and it is not among the first QUICK rows.

    Args:
        strategies: Names from STRATEGIES.
        seeds: Number of cases with different seeds, for each row and strategy.
        through: Name of the framework that trains, or "raw".
    """
    cases: list[Case] = []
    left_out: dict[str, str] = {}
    for row in ROWS[: QUICK if quick else None]:
        chosen = [name for name in strategies if _trains(row, name)]
        if chosen and (reason := _untrainable(row, ranks, through)):
            left_out[row.row] = reason
            continue
        for name in chosen:
            cases += [replace(row, strategy=name, ranks=ranks, seed=seed) for seed in range(seeds)]
    return cases, left_out


def _untrainable(row: Case, ranks: int, through: str) -> str:
    """Returns why a row cannot be trained, or ""."""
    if ranks % row.ranks:
        return f"needs a multiple of {row.ranks} ranks"
    if through != "raw":
        if row.plain_backward or not row.config.get("managed_gradient_accumulation", True):
            return "a framework calls the engine in its own way"
        if row.precision == "float16":
            return "a framework scales the loss in its own way"
        if row.precision == "bfloat16" and through == "transformers" and not uses_gpus(ranks):
            return "transformers trains in bfloat16 on GPUs only"
    reason = lacks_float16(ranks) if row.precision == "float16" else ""
    return reason or unknown(row.config, row.needs)


def _trains(row: Case, strategy: str) -> bool:
    stage, offload = ZERO.get(strategy, (None, False))
    return (not row.stages or stage in row.stages) and (row.offload or not offload)


def stage_of(case: Case) -> int | None:
    return ZERO.get(case.strategy, (None, False))[0]


def deepspeed_config(case: Case) -> dict[str, Any]:
    """Returns DeepSpeed's configuration of a case, in which `case.config` replaces default keys, also within
    "zero_optimization"."""
    stage, offload = ZERO[case.strategy]
    own: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 30000}
    if stage == 3:
        own["stage3_param_persistence_threshold"] = 200
    if offload:
        own["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            own["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": case.accumulate,
        "gradient_clipping": case.clip,
        "bf16": {"enabled": case.precision == "bfloat16"},
        "fp16": {"enabled": case.precision == "float16", "initial_scale_power": 8},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's optimizer also on the CPU: nothing to compile
        "steps_per_print": 10**9,
        **case.config,
        "zero_optimization": own | case.config.get("zero_optimization", {}),
    }
