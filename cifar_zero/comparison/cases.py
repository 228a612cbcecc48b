"""`cifar-zero compare --acceptance`: short trainings that execute the code of DeepSpeed in which errors have been."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cifar_zero.config import command_line
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count
from cifar_zero.training.resolve import resolve

STEPS = 8
"""Optimizer steps of a case, all of them checked: a wrong gradient shows at the first, a stale state at the second."""

BATCH = 32
"""Least number of images of a step, over all ranks; it is the next multiple of the micro-batches of all ranks."""

COMMON = [
    *("--data.source", "synthetic", "--data.val_fraction", "0", "--max_steps", str(STEPS), "--epochs", str(STEPS)),
    # Each step has another learning rate, and the first one moves the weights.
    *("--schedule", "exponential", "--schedule.gamma", "0.85", "--check_steps", str(STEPS)),
]

SGD = "--optimizer sgd --optimizer.lr 0.02"  # hides no wrong scale of the gradient, as Adam does
ADAMW = "--optimizer adamw --optimizer.lr 0.005 --optimizer.weight_decay 0.5"  # matrices decay, so there are two groups
EDGE_CASES = "--model torture"
NET = "--model net --init he"
# With places for every image in every expert none is dropped: dropping is random.
EXPERTS = "--model net_moe --model.num_experts [4] --model.capacity_factor 4"
CLIP = "--gradient_clip_val 0.5"  # less than the norm of each model's gradient

CONFIGURATIONS = Path(__file__).parent / "configurations"
"""DeepSpeed configurations with options that no strategy here turns on."""


@dataclass(frozen=True)
class Row:
    """A recipe of the acceptance and what it is there for."""

    name: str
    why: str  # the code that it executes
    flags: str
    accumulate: int = 1
    one_rank: bool = False  # train on one rank too, or only
    several_ranks: bool = True
    stages: str = "0123"  # of ZeRO; those of other families train the rows with all stages
    raw: str = ""  # a file of CONFIGURATIONS, in place of the strategies


ROWS = (
    Row("float32, accumulated", "sums of micro-batches", f"{EDGE_CASES} {SGD} --model.unused true", 4, one_rank=True),
    Row("bfloat16, accumulated", "sums in the low precision", f"{NET} {SGD} --precision bf16-mixed", 4, one_rank=True),
    Row(
        "bfloat16, AdamW, clipped", "master weights, decay, norm", f"{EDGE_CASES} {ADAMW} {CLIP} --precision bf16-mixed"
    ),
    Row("AdamW, clipped, accumulated", "the norm of all shards", f"{EDGE_CASES} {ADAMW} {CLIP} --model.unused true", 4),
    Row(
        "several buckets",
        "a bucket that is reduced in mid-backward; a parameter larger than a bucket",
        f"{EDGE_CASES} {SGD} --model.unused true --zero.reduce_bucket_size 2000",
        4,
        stages="123",
    ),
    Row(
        "all parameters sharded",
        "stage 3: gathering, prefetching and releasing each parameter",
        f"{NET} {ADAMW} --zero.param_persistence_threshold 0 --zero.prefetch_bucket_size 500 "
        "--zero.max_live_parameters 20000 --zero.sub_group_size 20000",
        4,
        stages="3",
    ),
    Row("a group without trained weights", "an empty group", f"{NET} {ADAMW} {CLIP} --trainable *.bias", stages="123"),
    Row("experts", "a gate, experts that every rank has", f"{EXPERTS} {ADAMW} --model.ep_size 1", 4, one_rank=True),
    Row("experts, spread", "experts on several ranks", f"{EXPERTS} {ADAMW} --model.ep_size 2", stages="012"),
    Row(
        "gradients that are not contiguous",
        "stages 1 and 2 with contiguous_gradients false (DeepSpeed pull request 8382)",
        f"{EDGE_CASES} {SGD}",
        raw="deepspeed_stage_2_not_contiguous.json",
    ),
    Row(
        "gradients kept in float32",
        "grad_accum_dtype (DeepSpeed pull request 7985)",
        f"{NET} {SGD} --precision bf16-mixed",
        raw="deepspeed_stage_1_fp32_gradients.json",
    ),
    Row(
        "parameters fetched by all-reduce",
        "stage 3 with stage3_use_all_reduce_for_fetch_params (DeepSpeed pull request 8158)",
        f"{EDGE_CASES} {SGD}",
        raw="deepspeed_stage_3_all_reduce.json",
    ),
)
"""The first four train under every strategy; QUICK of them are those of --quick."""

QUICK = 3

ON_GPUS = (Row("float16, clipped", "the loss scale, skipped steps", f"{NET} {SGD} {CLIP} --precision 16-mixed", 4),)

WITHOUT = ("baseline", "fsdp", "tensor_parallel", "pipeline")
"""Strategies without cases: plain PyTorch, another name of fsdp2, and those that train only vision transformers."""

RECIPE = {
    "steps": str(STEPS),
    "batch_size": f"{BATCH}, or the next multiple of micro-batches x ranks",
    "images": "two batches of noise",
}
"""What all cases share, for the report."""


@dataclass(frozen=True)
class Case:
    """A training of which each step is checked."""

    name: str
    row: str  # the recipe; the other axis of the table is the strategy
    strategy: str
    ranks: int
    accumulate: int
    flags: tuple[str, ...]  # of cifar-zero train; with --module, of a user's own LightningModule


def plan_cases(strategies: Sequence[str], ranks: int, quick: bool, seeds: int = 1) -> list[Case]:
    """Returns the cases of this machine, those of one number of ranks next to each other.

    Args:
        strategies: Names or raw DeepSpeed configurations; by default all that can train here.
        ranks: The largest number of ranks.
        quick: Only the first QUICK rows.
        seeds: Trainings of each case.

    Raises:
        UsageError: A strategy is unknown, or none of its cases can train on `ranks` here.
    """
    for name in strategies:
        command_line.parse(command_line.strategy_flags(name))  # refuses an unknown name, and says which is meant
    rows = [*ROWS[:QUICK]] if quick else [*ROWS, *(ON_GPUS if gpu_count() else ())]
    names = [*strategies] or [name for name in STRATEGIES if name not in WITHOUT]
    cases: list[Case] = []
    refused: dict[str, str] = {}
    for size in sorted({ranks, 1}, reverse=True):
        for row in rows:
            if not (row.several_ranks if size > 1 else row.one_rank or ranks == 1):
                continue
            for name in [str(CONFIGURATIONS / row.raw)] * (not strategies) if row.raw else names:
                if not row.raw and not _belongs(name, row):
                    continue
                try:
                    cases += [_case(name, row, size, seed) for seed in range(seeds)]
                except UsageError as error:
                    refused.setdefault(name, str(error))
    found = {case.strategy for case in cases if case.ranks == ranks}
    for name in strategies if strategies else names[:1]:
        if Path(name).stem not in found:
            raise UsageError(f"--strategies {name}: no case on {ranks} ranks: {refused.get(name, 'it has none')}")
    return cases


def _belongs(strategy: str, row: Row) -> bool:
    """Whether a row is for a strategy: a stage of ZeRO, or if it is for all stages, any other one."""
    spec = STRATEGIES.get(strategy)
    if spec is None or spec.family != "deepspeed":
        return row.stages == "0123"
    return str(spec.stage) in row.stages


def _case(strategy: str, row: Row, ranks: int, seed: int) -> Case:
    """Returns a case; raises UsageError if it cannot train here."""
    pieces = row.accumulate * ranks
    batch = -(-BATCH // pieces) * pieces
    flags = [*COMMON, *command_line.strategy_flags(strategy), "--devices", str(ranks), "--seed", str(seed)]
    flags += ["--batch_size", str(batch), "--data.synthetic_size", str(2 * batch)]
    flags += ["--accumulate", str(row.accumulate), *row.flags.split()]
    resolve(command_line.parse(flags))
    name = Path(strategy).stem
    of = f"{row.name}, 1 rank" if ranks == 1 else f"{row.name}, {ranks} ranks"
    of += f", seed {seed}" if seed else ""
    return Case(f"{name}: {of}", of, name, ranks, row.accumulate, tuple(flags))
