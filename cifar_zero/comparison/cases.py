"""Defines the cases of `cifar-zero compare --acceptance`, called acceptance cases. They are short runs that execute the
parts of DeepSpeed where errors have been found."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from cifar_zero.comparison.reading import counted
from cifar_zero.comparison.result import Variant
from cifar_zero.comparison.resuming import Continuation, Resolve
from cifar_zero.config import command_line
from cifar_zero.config.placement import ComputeOptions, OffloadConfig, ZeROConfig
from cifar_zero.config.run import Run
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.console import command
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count
from cifar_zero.training.resolve import resolve

STEPS = 4
"""Number of optimizer steps in a case. All of them are checked. A wrong gradient shows at the first step, and a stale
state at the second."""

BATCH = 32
"""Minimum number of images per step, over all ranks. It is rounded up to a multiple of micro-batches times ranks."""

COMMON = [
    *("--data.source", "synthetic", "--data.val_fraction", "0", "--max_steps", str(STEPS), "--epochs", str(STEPS)),
    *("--check_steps", str(STEPS)),
]

FALLING = "--schedule exponential --schedule.gamma 0.85"
"""Flags of an exponential schedule. The learning rate differs from step to step, and the first step already changes the
weights."""

WARMUP = "--schedule warmup_lr --schedule.warmup_num_steps 4 --schedule.warmup_min_lr 0.002"
"""Flags of DeepSpeed's schedule WarmupLR, which DeepSpeedExamples' CIFAR-10 program uses."""

SGD = "--optimizer sgd --optimizer.lr 0.02"  # does not hide a wrong scale of the gradient, as Adam does
ADAMW = "--optimizer adamw --optimizer.lr 0.005 --optimizer.weight_decay 0.5"  # only matrices decay: two groups
MUON = "--optimizer muon_sgd"
EDGE_CASES = "--model torture"
NET = "--model net --init he"
# Every expert has capacity for every image, because images beyond the capacity are dropped at random.
EXPERTS = "--model net_moe --model.num_experts [4] --model.capacity_factor 4"
CLIP = "--gradient_clip_val 0.5"  # less than the gradient norm of each model, so that clipping takes effect

CONFIGURATIONS = Path(__file__).parent / "configurations"
"""Folder of DeepSpeed configurations with options that no strategy of this program turns on."""


@dataclass(frozen=True)
class Row:
    """A recipe that is chosen to execute a certain code path of a strategy. `make_case` combines it with a strategy,
    which gives one acceptance case."""

    name: str
    why: str  # the code path that the recipe executes
    flags: str
    accumulate: int = 1
    one_rank: bool = False  # whether the row is also trained on one rank
    schedule: str = FALLING
    stages: Sequence[int] = ()  # the ZeRO stages that train it; empty for all strategies, also of other families
    ema: float = 0.0  # decay of an average of the weights; strategies that support no average train without it
    raw: str = ""  # a file in CONFIGURATIONS under which the row is trained, instead of the strategies


ROWS = (
    Row("float32, accumulated", "sums of micro-batches", f"{EDGE_CASES} {SGD} --model.unused true", 4),
    Row("bfloat16, accumulated", "sums in the low precision", f"{NET} {SGD} --precision bf16-mixed", 4),
    Row(
        "bfloat16, AdamW, clipped",
        "master weights, decay, norm",
        f"{EDGE_CASES} {ADAMW} {CLIP} --precision bf16-mixed",
        ema=0.5,
    ),
    Row("AdamW, clipped, accumulated", "the norm of all shards", f"{EDGE_CASES} {ADAMW} {CLIP} --model.unused true", 4),
    Row(
        "several buckets",
        "a bucket that is reduced in mid-backward; a parameter larger than a bucket; the round-robin order",
        f"{EDGE_CASES} {SGD} --model.unused true --zero.reduce_bucket_size 2000 --zero.round_robin_gradients true",
        4,
        schedule=WARMUP,
        stages=(1, 2, 3),
    ),
    Row(
        "all parameters sharded",
        "stage 3: gathering, prefetching and releasing each parameter",
        f"{NET} {ADAMW} --zero.param_persistence_threshold 0 --zero.prefetch_bucket_size 500 "
        "--zero.max_live_parameters 20000 --zero.sub_group_size 20000",
        4,
        stages=(3,),
    ),
    Row(
        "Muon, warmed up",
        "an optimizer that needs whole matrices, two rules",
        f"{NET} {MUON}",
        schedule=WARMUP,
        stages=(0,),
    ),
    Row(
        "frozen layers",
        "weights that no optimizer has; a batch norm in evaluation, whose statistics stay as they are",
        f"{EDGE_CASES} {ADAMW} {CLIP} --trainable project.* twice.* head.*",
        stages=(1, 2, 3),
    ),
    Row("experts", "a gate, experts that every rank has", f"{EXPERTS} {ADAMW} --model.ep_size 1", 4, one_rank=True),
    Row("experts, spread", "experts on several ranks", f"{EXPERTS} {ADAMW} --model.ep_size 2", stages=(0, 1, 2)),
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
"""The recipes of the acceptance cases. Every strategy trains the first four rows. With --quick, only the first QUICK
rows are trained."""

QUICK = 3

ON_GPUS = (Row("float16, clipped", "the loss scale, skipped steps", f"{NET} {SGD} {CLIP} --precision 16-mixed", 4),)

RESUMES = (
    Continuation(
        3,  # in the middle of the second of two epochs
        row="bfloat16, AdamW, clipped",
        why="the strategy's own checkpoint: master weights, moments, positions, the average of --ema",
    ),
    Continuation(
        3,
        row="AdamW, clipped, accumulated",
        of="deepspeed_stage_2",
        under="deepspeed_stage_3",
        why="a checkpoint with one flat tensor of all parameters, sharded again parameter by parameter",
    ),
    Continuation(
        3,
        row="frozen layers",
        of="deepspeed_stage_3",
        under="deepspeed_stage_1",
        ranks=1,
        why="shards that are joined without their padding; weights that no optimizer has",
    ),
)
"""Rows whose cases are also saved after a step, and then resumed in new processes. `why` is the code path that the
resumed case executes."""

WITHOUT = ("baseline", "fsdp", "tensor_parallel", "pipeline")
"""Strategies without acceptance cases: plain PyTorch, an alias of fsdp2, and two strategies that train only vision
transformers."""

DEFAULT = [name for name in STRATEGIES if name not in WITHOUT]
"""Strategies that the acceptance cases test by default. A strategy that this machine cannot train is left out."""

RECIPE = {
    "steps": str(STEPS),
    "batch_size": f"{BATCH}, or the next multiple of micro-batches x ranks",
    "images": "two batches of noise",
}
"""Settings that all cases share, as the report shows them."""

DRAWN_RECIPES = ((EDGE_CASES, "32-true"), (NET, "32-true"), (EXPERTS, "32-true"), (NET, "bf16-mixed"))
"""Models for random cases, each with a precision at which rounding is small enough for most gradients of the model to
be judged."""

DRAWN_OPTIMIZERS = (SGD, ADAMW, "--optimizer adam", "--optimizer lion", "--optimizer adagrad")
DRAWN_SECTIONS: dict[str, Any] = {"zero.": ZeROConfig, "offload.": OffloadConfig, "": ComputeOptions}
NOT_DRAWN = {"compile", "cuda_graphs", "activation_checkpointing"}
"""Options that random cases leave at their defaults. With compile or cuda_graphs, each case takes a minute.
activation_checkpointing needs blocks to recompute, which these models do not have."""


def plan_cases(strategies: Sequence[str], ranks: int, quick: bool, seeds: int = 1) -> list[Variant]:
    """Returns the acceptance cases that this machine can train, grouped by number of ranks.

    Args:
        strategies: Names of strategies, or raw DeepSpeed configurations. The default is every strategy in DEFAULT that
            can train on this machine.
        ranks: The largest number of ranks. Some rows are trained on one rank too.
        quick: Whether to return only cases of the first QUICK rows.
        seeds: Number of cases for each row and strategy. Their seeds are counted from 0.

    Raises:
        UsageError: If a strategy is unknown, or none of its cases can train on `ranks` ranks on this machine.
    """
    for name in strategies:
        command_line.parse(command_line.strategy_flags(name))  # raises UsageError for an unknown name
    rows = [*ROWS[:QUICK]] if quick else [*ROWS, *(ON_GPUS if gpu_count() else ())]
    cases: list[Variant] = []
    refused: dict[str, str] = {}
    for size in sorted({ranks, 1}, reverse=True):
        for row in rows:
            if size < ranks and not row.one_rank:
                continue
            for name in _strategies_of(row, strategies):
                try:
                    cases += [make_case(row, name, size, seed) for seed in range(seeds)]
                except UsageError as error:
                    refused.setdefault(name, str(error))
    found = {case.strategy for case in cases if case.world_size == ranks}
    for name in strategies or DEFAULT[:1]:
        if Path(name).stem not in found:
            why = refused.get(name, "no recipe of the acceptance uses it: leave it out of --strategies")
            raise UsageError(f"{name}: no case can be trained on {ranks} ranks: {why}")
    return cases


def _strategies_of(row: Row, strategies: Sequence[str]) -> list[str]:
    """Returns the strategies under which a row is trained: the DeepSpeed strategies whose ZeRO stage is in
    `row.stages`, or all strategies if it is empty. A row with a raw configuration is trained only under this
    configuration, and not at all if `strategies` are given.

    Args:
        row: The row to train.
        strategies: Names of strategies to choose from, or raw DeepSpeed configurations. The default is DEFAULT.
    """
    if row.raw:
        return [] if strategies else [str(CONFIGURATIONS / row.raw)]
    found = []
    for name in strategies or DEFAULT:
        spec = STRATEGIES.get(name)
        if not row.stages or (spec is not None and spec.family == "deepspeed" and spec.stage in row.stages):
            found.append(name)
    return found


def resolved(flags: Sequence[str]) -> Run:
    """Returns the resolved run for the flags of a case. Raises UsageError if the run cannot be trained on this
    machine."""
    return resolve(command_line.parse(flags))


def make_case(row: Row, strategy: str, ranks: int, seed: int = 0) -> Variant:
    """Returns the case that trains a row under a strategy. Raises UsageError if the case cannot be trained on this
    machine."""
    micro_batches = row.accumulate * ranks
    batch = math.ceil(BATCH / micro_batches) * micro_batches
    flags = [*COMMON, *command_line.strategy_flags(strategy), "--devices", str(ranks), "--seed", str(seed)]
    flags += ["--batch_size", str(batch), "--data.synthetic_size", str(2 * batch), "--accumulate", str(row.accumulate)]
    flags += [*row.schedule.split(), *row.flags.split()]
    if row.ema and (strategy not in STRATEGIES or STRATEGIES[strategy].averages):
        flags += ["--ema", str(row.ema)]
    resolved(flags)  # raises UsageError if this machine cannot train it
    name = f"{row.name}, {counted(ranks, 'rank', 'ranks')}"
    if seed:
        name += f", seed {seed}"
    column = Path(strategy).stem
    return Variant(f"{column}: {name}", column, ranks, flags, command("train", *flags), row=name, why=row.why)


def cases_by_strategy(
    strategies: Sequence[str], default: Sequence[str], ranks: int, flags: Sequence[str], row: str, resolve: Resolve
) -> list[Variant]:
    """Returns a case for each strategy.

    Args:
        strategies: Names of strategies, or raw DeepSpeed configurations.
        default: Names of strategies to use if `strategies` is empty. Strategies that cannot train on this machine are
            left out.
        ranks: Number of ranks.
        flags: Flags of all cases.
        row: Name of the cases in the report's table of cases and strategies.
        resolve: Function that is called with the flags of each case. It raises UsageError if the case cannot train on
            this machine.

    Raises:
        UsageError: If one of the given strategies cannot train on this machine.
    """
    cases = []
    for strategy in strategies or default:
        given = [*flags, *command_line.strategy_flags(strategy), "--devices", str(ranks)]
        try:
            resolve(given)
        except UsageError:
            if strategies:
                raise
            continue
        name = Path(strategy).stem
        cases.append(Variant(name, name, ranks, given, row=row))
    return cases


def random_cases(count: int, ranks: int) -> list[Variant]:
    """Returns `count` random cases, each on one rank or on `ranks` ranks. Repeated calls on the same machine return the
    same cases."""
    cases: list[Variant] = []
    number = 0
    while len(cases) < count:
        with suppress(UsageError):  # the machine cannot train the strategy, or the strategy cannot train the recipe
            cases.append(_random_case(number, ranks))
        number += 1
    return cases


def _random_case(number: int, ranks: int) -> Variant:
    """Returns a random case. `number` seeds the random choices. Options that the case's strategy does not support are
    left out. Raises UsageError if the case cannot be trained."""
    draw = random.Random(number)
    strategy, size, accumulate = draw.choice(DEFAULT), draw.choice([1, ranks]), draw.choice([1, 2, 4])
    model, precision = draw.choice(DRAWN_RECIPES)
    optimizer, schedule, clip = draw.choice(DRAWN_OPTIMIZERS), draw.choice([FALLING, WARMUP]), draw.choice(["", CLIP])
    flags = f"--precision {precision} {model} {optimizer} {clip}"
    row = Row(f"random {number}", "a random placement", flags, accumulate, schedule=schedule)
    case = make_case(row, strategy, size)
    for option in _options(draw):
        with suppress(UsageError):
            longer = replace(row, flags=f"{row.flags} {option}")
            case, row = make_case(longer, strategy, size), longer
    return case


def _options(draw: random.Random) -> Iterator[str]:
    """Chooses about half of the options for ZeRO, offloading and computation at random, and yields the flag of each
    with a random value."""
    for prefix, section in DRAWN_SECTIONS.items():
        for option in fields(section):
            value: Any = f"{draw.uniform(0.1, 1):.2f}"
            if isinstance(option.default, bool):
                value = str(not option.default).lower()
            elif isinstance(option.default, int):
                value = str(int(10 ** draw.uniform(2, 5)))
            if option.name not in NOT_DRAWN and draw.random() < 0.5:
                yield f"--{prefix}{option.name} {value}"
