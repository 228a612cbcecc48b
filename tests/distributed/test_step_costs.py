"""Counts what a training step costs the host: how often the host waits for the device, which then idles, how many
operators it calls, and how many bytes these operators copy. `pytest -s` prints the table of docs/performance.md."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.loops import bare, common
from cifar_zero import data as sources
from cifar_zero.config.recipe import DataConfig
from tests.distributed.step_costs import COSTS_FILE, COUNTED, StepCosts, counted_costs
from tests.support.helpers import WHOLE, run_folder_of, train_all

pytestmark = pytest.mark.distributed

NORM = 1  # ZeRO reads whether the norm of all gradients is finite (is_invalid_grad_norm); no switch in 0.19.8
SERIAL = 13  # fp16/unfused_optimizer.py reads it of each of the ten gradients, of their ranks, and two norms; no switch
ANY = math.inf  # no limit
BATCH = {"net": 512, "resnet18": 16}
"""Number of images of a step. With 16 images, a step of resnet18 takes less than a second on one core."""

Costs = dict[str, int]

STEPS = {
    "net ddp 32-true": (0, 53, 3_566_728),
    "net deepspeed_stage_2 32-true": (NORM, 106, 4_514_308),
    "net deepspeed_stage_3 bf16-mixed": (NORM, ANY, ANY),
}
"""How often a step waits, and the largest numbers of its operators and of bytes that they copy, by model, strategy and
precision, on two ranks. Measured with torch 2.15.0 and DeepSpeed 0.19.8."""
MODELS = ["net"]
if WHOLE:
    MODELS += ["resnet18"]
    STEPS |= {
        "net ddp bf16-mixed": (0, ANY, ANY),
        "net fsdp2 bf16-mixed": (0, ANY, ANY),
        "net deepspeed_stage_0 32-true": (0, 56, 3_814_752),
        "net deepspeed_stage_0 bf16-mixed": (SERIAL, ANY, ANY),
        "net deepspeed_stage_1 32-true": (NORM, 105, 4_514_308),
        "net deepspeed_stage_1 bf16-mixed": (0, ANY, ANY),
        "net deepspeed_stage_2 bf16-mixed": (0, ANY, ANY),
        "net deepspeed_stage_3 32-true": (NORM, 131, 4_434_812),
        "resnet18 ddp 32-true": (0, 249, 44_063_488),
        "resnet18 deepspeed_stage_0 32-true": (0, 252, 88_759_336),
        "resnet18 deepspeed_stage_1 32-true": (NORM, 433, 203_411_340),
        "resnet18 deepspeed_stage_2 32-true": (NORM, 434, 203_411_340),
        "resnet18 deepspeed_stage_3 32-true": (NORM, 535, 200_498_956),
    }


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Costs]]:
    """Returns the costs of all COUNTED steps, by model and loop. A loop is `bare`, `baseline`, or a strategy and
    precision on two ranks. Prints the costs per step at the end."""
    folder, cache = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("images")
    # As many images as the steps need, so that no epoch begins while costs are counted.
    images = DataConfig(source="synthetic", cache=str(cache), synthetic_size=10 * max(BATCH[name] for name in MODELS))
    sources.prepare(images)
    data = ["--data.source", "synthetic", "--data.cache", str(cache), "--data.val_fraction", "0"]
    data += ["--data.synthetic_size", str(images.synthetic_size)]
    same = [*data, "--accelerator", "cpu", "--logger", "none", "--log_interval", "100"]
    same += ["--warmup_steps", str(COUNTED[-1]), "--bench_steps", "2"]
    runs: dict[Path, list[str]] = {}
    for model in MODELS:
        size = ["--model", model, "--batch_size", str(BATCH[model])]
        runs[folder / f"{model} baseline"] = [*same, *size, "--devices", "1"]
    for name in STEPS:
        model, strategy, precision = name.split()
        runs[folder / name] = [*same, "--model", model, "--batch_size", str(BATCH[model]), "--devices", "2"]
        runs[folder / name] += ["--strategy", strategy, "--precision", precision]
        if strategy == "deepspeed_stage_3":
            runs[folder / name] += ["--zero.param_persistence_threshold", "0"]  # shards all parameters
    train_all(runs, counted_costs)
    all_costs = {f"{model} bare": costs_of_bare_loop(model, images) for model in MODELS}
    for path in runs:
        all_costs[path.name] = json.loads((run_folder_of(path) / COSTS_FILE).read_text())
    yield all_costs
    print("\n| run | waits | operators | collectives | bytes copied |\n|---|---|---|---|---|")
    for name, totals in sorted(all_costs.items()):
        print(f"| {name} |", " | ".join(f"{total / len(COUNTED):,g}" for total in totals.values()), "|")


def costs_of_bare_loop(model: str, images: DataConfig) -> Costs:
    """Returns the costs of the tuned bare loop, for as many steps as are COUNTED in a run."""
    threads = torch.get_num_threads()
    totals: list[Costs] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "WARMUP_STEPS", 1)
        for steps in (1, 1 + len(COUNTED)):
            with StepCosts() as counted:
                bare.train(images, BATCH[model], steps, torch.device("cpu"), tuned=True, model=model)
            totals.append(counted.totals())
    torch.set_num_threads(threads)  # the loop has changed threads and kernels
    torch.backends.mkldnn.set_flags(True)
    fewer, more = totals
    return {name: more[name] - fewer[name] for name in more}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_waits_calls_and_copies_no_more(name: str, costs: dict[str, Costs]):
    waits, operators, copied = STEPS[name]
    assert costs[name]["waits"] == waits * len(COUNTED), costs[name]
    assert costs[name]["operators"] <= operators * len(COUNTED), costs[name]
    assert costs[name]["copied_bytes"] <= copied * len(COUNTED), costs[name]


@pytest.mark.parametrize("model", MODELS)
def test_a_step_of_the_baseline_costs_no_more_than_one_of_the_bare_loop(model: str, costs: dict[str, Costs]):
    baseline_costs, bare_costs = costs[f"{model} baseline"], costs[f"{model} bare"]
    for name in bare_costs:
        assert baseline_costs[name] <= bare_costs[name], (name, baseline_costs, bare_costs)
