"""Predicts the memory that a run needs under each strategy, before anything is launched, and recommends one."""

import json
import shlex
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

from rich import box
from rich.console import Console
from rich.table import Table

from cifar_zero.config import command_line, rules
from cifar_zero.config.placement import Placement
from cifar_zero.config.run import Run, with_accelerator
from cifar_zero.core import exits
from cifar_zero.core.console import command, torchrun
from cifar_zero.core.errors import UsageError
from cifar_zero.core.hardware import gpu_count
from cifar_zero.planning.model_states import Network, network_of, network_of_size
from cifar_zero.planning.survey import RULE, MemoryBudget, MemoryEstimate, available, gigabytes, recommended, survey
from cifar_zero.training.resolve import make_run, resolve_devices

EPILOG = """\
exit code: 0 if a strategy fits, 1 if none does, 2 for wrong usage

examples:
  %(prog)s --model vit_large --devices 8 --device_memory 80GB --precision bf16-mixed --optimizer adamw
  %(prog)s --model vit_13b --devices 8 --num_nodes 4 --device_memory 80GB --host_memory 1TB --batch_size 256
  %(prog)s --parameters 100e9 --optimizer adamw --precision bf16-mixed --device_memory 80GB --table

All other options are those of train (cifar-zero train --help all).
"""

IMAGES = 32  # micro-batch per rank if no batch size is given
WIDE = 132  # width of a terminal, in characters, from which the table shows all columns


def main() -> int:
    """Prints the plan; returns the exit code, 1 if nothing fits."""
    arguments, flags = _parse()
    config = command_line.parse(flags)
    if config.placement.ds_config:
        raise UsageError("--ds_config cannot be planned: leave it out, all named strategies are planned")
    config = config.changed(strategy=Placement.strategy)  # all strategies are planned
    any_batch_size, here = "batch_size" not in config.named, arguments.device_memory is None
    if config.placement.devices == "auto" and (any_batch_size or not here):
        config = config.changed(devices=max(1, gpu_count()) if here and config.placement.accelerator != "cpu" else 1)
    config = resolve_devices(config) if here else with_accelerator(config, config.placement.accelerator != "cpu")
    room = available(config, arguments.device_memory, arguments.host_memory)
    if any_batch_size:
        config = config.changed(batch_size=IMAGES * config.placement.world_size * config.placement.accumulate)
        flags += ["--batch_size", str(config.recipe.batch_size)]
    return _plan(make_run(config), arguments, flags, room)


def _plan(run: Run, arguments: Namespace, flags: list[str], room: MemoryBudget) -> int:
    of_size = arguments.parameters is not None
    if not of_size:
        rules.check_model(run)
    net = network_of_size(round(arguments.parameters)) if of_size else network_of(run)
    lines = None if of_size else {}
    needs = survey(run, net, room, lines)
    choice, reason = recommended(needs, room)
    start = ""
    if choice is not None and not of_size:
        nodes, chosen = run.placement.num_nodes, [*flags, "--strategy", choice.strategy]
        several = f"{torchrun('train', nodes, run.placement.devices)} {shlex.join(chosen)}"
        start = several if nodes > 1 else command("train", *chosen)
    if arguments.json:
        plan = {
            "schema": 1,
            "parameters": net.elements,
            "trained_parameters": net.trained,
            "ranks": run.placement.world_size,
            "micro_batch": None if of_size else run.micro_batch,
            "room": {"device": room.device, "host": room.host, "disk": room.disk},
            "recommended": choice and choice.strategy,
            "reason": reason,
            "command": start,
            "strategies": [
                {**asdict(need), "device": need.device, "host": need.host, "disk": need.disk} for need in needs
            ],
        }
        print(json.dumps(plan, indent=1))  # all sizes in bytes
        return int(choice is None)
    console = Console(highlight=False)
    console.print(_heading(run, net, of_size, room), soft_wrap=True)
    if arguments.table:
        by_devices = {}
        for count in (4**power for power in range(8)):  # 1 to 16,384
            batch_size = run.micro_batch * count * run.placement.accumulate  # the same micro-batch on each
            config = run.changed(devices=count, num_nodes=1, batch_size=batch_size)
            # What this machine lacks does not count for so many devices.
            by_devices[count] = survey(config, net, replace(room, elsewhere=True), lines)
        print_scaling(by_devices, room, console)
    else:
        print_plan(needs, console)
    for line in filter(None, (f"recommended ({RULE}):", reason, start)):
        console.print(line, soft_wrap=True)
    return int(choice is None)


def _parse() -> tuple[Namespace, list[str]]:
    parser = exits.Parser(
        prog=command("plan"),
        usage="%(prog)s [--device_memory SIZE] [--host_memory SIZE] [--table] [--json] [--<option> VALUE ...]",
        description="Predicts the memory that a run needs under each strategy, before anything is launched, and "
        "recommends one.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    device = (
        "memory of one device, such as 80GB or 24GiB (10^9 bytes per GB, 2^30 per GiB; a bare number is GB; default: "
        "free memory of this machine's GPUs or, without a GPU, its free memory divided among the CPU ranks)"
    )
    host = "CPU memory of one node, for offloading or CPU ranks (default: what is free; unchecked with --device_memory)"
    states = "plan the model states of a model of N parameters (100e9) instead of --model"
    add("--device_memory", metavar="SIZE", help=device)
    add("--host_memory", metavar="SIZE", help=host)
    add("--parameters", metavar="N", type=float, help=states)
    add("--table", action="store_true", help="print the memory on 1 to 16,384 devices, with the same micro-batch")
    add("--json", action="store_true", help="print one JSON object")
    arguments, flags = parser.parse_known_args()
    if arguments.parameters is not None:
        if not 1 <= arguments.parameters < 1e18:
            raise UsageError(f"--parameters {arguments.parameters:g}: give a number such as 100e9")
        for flag in (flag.split("=")[0] for flag in flags):
            if flag == "--model" or flag.startswith(("--model.", "--lora.", "--trainable", "--activation_")):
                raise UsageError(f"{flag} cannot be combined with --parameters: leave one of them out")
    return arguments, [*flags, *(["--debug"] if arguments.debug else [])]


def _heading(run: Run, net: Network, of_size: bool, room: MemoryBudget) -> str:
    model = "a model" if of_size else run.recipe.model.name
    trained = "" if net.trained == net.elements else f" ({net.trained:,} trained)"
    ranks = f"{run.placement.world_size} rank{'s'[: run.placement.world_size > 1]}"
    images = "model states only" if of_size else f"micro-batches of {run.micro_batch} images"
    where = "" if room.elsewhere else " of this machine's " + ("free memory" if room.shared else "GPU memory")
    return (
        f"{model}, {net.elements:,} parameters{trained}, {run.recipe.optimizer.name}, {run.placement.precision}, "
        f"{ranks}, {images}; {gigabytes(room.device)} GB{where} available to a rank"
    )


def print_plan(needs: Sequence[MemoryEstimate], console: Console) -> None:
    """Prints a row for each strategy, in GB on the fullest rank, and notes; a narrow console sums model states."""
    wide = console.width >= WIDE
    has_disk = any(need.disk for need in needs if not need.refused)
    parts = ["parameters", "gradients", "optimizer", "buckets", "activations"] if wide else ["states", "activ."]
    table = _table([*parts, "device", "host", *["disk"] * has_disk, "sent, MB", "fits", "images"], wide)
    for need in needs:
        states = need.states.device
        split = [states.parameters, states.gradients, states.optimizer, need.buckets] if wide else [states.total]
        sizes = [*split, need.activations, need.device, need.host, *[need.disk] * has_disk]
        cells = ["-" if size is None else gigabytes(size) if size else "0" for size in sizes]
        fits = "-" if need.refused else "yes" if need.fits else "no"
        images = "-" if need.most_images is None else f"{need.most_images:,}"
        table.add_row(_short(need.strategy, console), *cells, f"{need.sent_bytes / 1e6:,.0f}", fits, images)
    console.print(table)
    console.print("\n".join(_notes(needs, console)))


def _table(headings: Iterable[str], wide: bool) -> Table:
    table = Table("GB per rank", *headings, box=box.SIMPLE, padding=(0, int(wide), 0, 0), pad_edge=False)
    for column in table.columns:
        column.justify = "left" if column.header == "GB per rank" else "right"
        column.no_wrap = True
    return table


def _short(strategy: str, console: Console) -> str:
    return strategy if console.width >= WIDE else strategy.removeprefix("deepspeed_")


def _notes(needs: Sequence[MemoryEstimate], console: Console) -> list[str]:
    """Returns what the columns mean, and why strategies are refused."""
    lines = ["device, host: the peak; sent: to other ranks in a step; images: the largest micro-batch that fits"]
    if console.width < WIDE:
        lines.append("stage_*: deepspeed_stage_*; activ.: activations")
    reasons: dict[str, list[str]] = {}
    for need in needs:
        if need.refused:
            reason = need.refused.replace(f"--strategy {need.strategy}", "it")
            reasons.setdefault(reason, []).append(need.strategy)
    lines += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return lines


def print_scaling(by_devices: Mapping[int, Sequence[MemoryEstimate]], room: MemoryBudget, console: Console) -> None:
    """Prints GB on the fullest rank by strategy and number of devices, or that `train` refuses it; a star marks what
    fits. On a CPU these are all of a rank's memory."""
    table = _table(map(str, by_devices), console.width >= WIDE)
    for row in zip(*by_devices.values(), strict=True):
        sizes = [(need.refused, need.compared(room)) for need in row]
        cells = ("- " if no else f"{gigabytes(size)}{'*' if size <= room.device else ' '}" for no, size in sizes)
        table.add_row(_short(row[0].strategy, console), *cells)
    console.print(table)
    console.print("*: fits; -: refused" + ("; stage_*: deepspeed_stage_*" if console.width < WIDE else ""))
