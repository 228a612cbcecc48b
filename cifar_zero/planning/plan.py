"""Predicts the memory that a run needs under each strategy, before anything is launched, and recommends one."""

import json
import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cifar_zero.config import command_line, rules
from cifar_zero.config.placement import Placement
from cifar_zero.config.run import with_accelerator
from cifar_zero.core import exits
from cifar_zero.core.console import command, torchrun
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count
from cifar_zero.planning.estimates import PLANNED, RULE, MemoryEstimate, available, estimate_all, gigabytes, recommended
from cifar_zero.planning.formulas import network_of
from cifar_zero.training.resolve import make_run, resolve_devices
from stepcheck.report import check_file

EPILOG = """\
exit code: 0 if a strategy fits, 1 if none does, 2 for wrong usage

examples:
  %(prog)s --model vit_large --devices 8 --device_memory 80GB --precision bf16-mixed --optimizer adamw
  %(prog)s --model vit_13b --devices 8 --num_nodes 4 --device_memory 80GB --host_memory 1TB --batch_size 256

All other options are options of train (cifar-zero train --help all).
"""

IMAGES = 32  # micro-batch per rank if no batch size is given


def main() -> int:
    """Prints the plan and returns the exit code, which is 1 if no strategy fits. With --html, writes the page instead
    and returns 0."""
    arguments, flags = _parse()
    config = command_line.parse(flags)
    if config.placement.ds_config:
        raise UsageError("--ds_config cannot be planned: leave it out to plan all named strategies")
    config = config.changed(strategy=Placement.strategy)  # every strategy is planned, whatever the settings name
    any_batch_size, here = "batch_size" not in config.named, arguments.device_memory is None
    any_devices = config.placement.devices == "auto"
    if any_devices and (any_batch_size or not here):
        gpus = gpu_count() if here and config.placement.accelerator != "cpu" else 0
        config = config.changed(devices=max(gpus, config.recipe.model.options.get("ep_size", 1)))
    config = (
        resolve_devices(config, PLANNED) if here else with_accelerator(config, config.placement.accelerator != "cpu")
    )
    budget = available(config, arguments.device_memory, arguments.host_memory)
    if any_batch_size:
        config = config.changed(batch_size=IMAGES * config.placement.world_size * config.placement.accumulate)
        flags += ["--batch_size", str(config.recipe.batch_size)]
    if arguments.html:
        page = arguments.html.resolve()  # so that a link stays a link
        check_file("html", page)
        if page.exists() and not page.is_file():
            raise UsageError(f"--html: {page} is a device or a pipe; give a file")
        from cifar_zero.planning.page import write_page

        write_page(page, with_accelerator(config, on_gpu=True))
        print(f"page  {arguments.html}")
        return 0
    run = make_run(config)
    rules.check_model(run)
    net = network_of(run)
    estimates = estimate_all(run, net, budget, {})
    choice, reason = recommended(estimates, budget)
    start = ""
    if choice is not None:
        flags += ["--strategy", choice.strategy]
        if any_devices:
            flags += ["--devices", str(run.placement.devices)]
        start = command("train", *flags)
        if run.placement.num_nodes > 1:
            start = f"{torchrun('train', run.placement.num_nodes, run.placement.devices)} {shlex.join(flags)}"
    if arguments.json:
        plan = {
            "schema": 2,
            "parameters": net.elements,
            "trained_parameters": net.trained,
            "ranks": run.placement.world_size,
            "micro_batch": run.micro_batch,
            "budget": {"device": budget.device, "host": budget.host},
            "recommended": choice and choice.strategy,
            "reason": reason,
            "command": start,
            "strategies": [
                {**asdict(estimate), "device": estimate.device, "host": estimate.host} for estimate in estimates
            ],
        }
        print(json.dumps(plan, indent=1))  # all sizes in bytes
        return int(choice is None)
    print(
        f"{run.recipe.model.name}, {net.elements:,} parameters ({net.trained:,} trained), {run.recipe.optimizer.name}, "
        f"{run.placement.precision}, micro-batches of {run.micro_batch} on each of {run.placement.world_size} "
        f"ranks; {gigabytes(budget.device)} GB available to a rank\n"
    )
    print_plan(estimates)
    print(f"recommended ({RULE}):\n{reason}")
    if start:
        print(start)
    return int(choice is None)


def _parse() -> tuple[Namespace, list[str]]:
    parser = exits.Parser(
        prog=command("plan"),
        usage="%(prog)s [--device_memory SIZE] [--host_memory SIZE] [--json] [--html FILE] [--<option> VALUE ...]",
        description="Predicts the memory that a run needs under each strategy, before anything is launched, and "
        "recommends one.",
        epilog=EPILOG,
    )
    device = (
        "memory of one device, such as 80GB or 24GiB (10^9 bytes per GB, 2^30 per GiB; a bare number is GB; default: "
        "the memory of this machine's GPUs or, without a GPU, its free memory divided among the CPU ranks)"
    )
    host = "CPU memory of one node, for offloading or CPU ranks (default: what is free; unchecked with --device_memory)"
    parser.add_argument("--device_memory", metavar="SIZE", help=device)
    parser.add_argument("--host_memory", metavar="SIZE", help=host)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    sliders = "write a page with sliders for model, devices, precision, batch and offload (takes up to a minute)"
    parser.add_argument("--html", metavar="FILE", type=Path, help=sliders)
    return parser.parse_known_args()


def print_plan(estimates: Sequence[MemoryEstimate]) -> None:
    """Prints a row for each strategy, in GB on the rank with the most bytes, and why strategies are refused."""
    row = "{:<31}{:>8}{:>9}{:>13}{:>8}{:>8}{:>6}{:>8}"
    print(row.format("GB per rank", "states", "buckets", "activations", "device", "host", "fits", "batch"))
    for estimate in estimates:
        parts = (estimate.states.device.total, estimate.buckets, estimate.activations, estimate.device, estimate.host)
        fits = "no"
        if estimate.refused:
            fits = "-"
        elif estimate.fits:
            fits = "yes"
        print(row.format(estimate.strategy, *map(gigabytes, parts), fits, f"{estimate.most_images:,}"))
    print("states: on the device; device, host: the peak; batch: the largest micro-batch that fits")
    for estimate in estimates:
        if estimate.refused:
            print(f"{estimate.strategy}: {estimate.refused}")
