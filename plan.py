"""The memory that a run needs of a rank under each strategy, before anything is launched, and which one to take.

python plan.py --model vit_large --devices 8 --device_memory 80GB [any option of train.py]
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import checks
import cli
import exits
import launch
from config import Config
from errors import UsageError
from hardware import gpu_count
from planning import machine
from planning.recommend import RULE, gigabytes, nothing_fits, recommended, refuse_if_none_runs, why
from planning.survey import Need, Room, micro_batch, survey

if TYPE_CHECKING:
    from planning.network import Network

EPILOG = """\
exit code: 0 where a strategy fits, 1 where none does, 2 for wrong usage

examples:
  python plan.py --model vit_large --devices 8 --device_memory 80GB --precision bf16-mixed --optimizer adamw
  python plan.py --model vit_13b --devices 8 --num_nodes 4 --device_memory 80GB --host_memory 1TB --batch_size 256
  python plan.py --model vit_large --devices 8 --num_nodes 2 --device_memory 80GB --bandwidth 100Gbit/s
  python plan.py --parameters 100e9 --optimizer adamw --precision bf16-mixed --device_memory 80GB --table

All other options are those of train.py (train.py --help).
"""

IMAGES = 32
"""Micro-batch of each rank where no batch size is given."""

OF_A_NETWORK = ("--model.", "--lora.", "--trainable", "--activation_")
"""Options that make no sense beside --parameters begin so."""

DEVICES = tuple(4**power for power in range(8))
"""Columns of --table: 1 to 16,384."""


def main() -> int:
    """Prints the plan; returns the exit code, 1 where nothing fits."""
    arguments, flags = _parse()
    config = cli.parse(flags)
    room, where = _settle(config, arguments)
    if not _names_batch_size(flags):
        config.batch_size = IMAGES * config.world_size * config.accumulate
        flags += ["--batch_size", str(config.batch_size)]
    micro_batch(config)  # refused as train.py does
    return _plan(config, arguments, flags, room, where)


def _plan(config: Config, arguments: Namespace, flags: list[str], room: Room, where: str) -> int:
    from rich.console import Console

    from planning import network
    from reports.plan import as_json, print_communication, print_plan, print_scaling

    of_size = arguments.parameters is not None
    if not of_size:
        checks.check_model(config)
    net = network.of_size(arguments.parameters) if of_size else network.of(config)
    lines = None if of_size else {}
    needs = survey(config, net, room, lines)
    refuse_if_none_runs(needs)
    choice = recommended(needs)
    verdict = nothing_fits(needs, room) if choice is None else f"{choice.strategy}: {why(choice, needs, room)}"
    command = ""
    if choice is not None and not of_size:
        program = launch.TORCHRUN if config.num_nodes > 1 else "python train.py"
        program = program.replace(
            "--nnodes N --nproc_per_node M", f"--nnodes {config.num_nodes} --nproc_per_node {config.devices}"
        )
        command = f"{program} {shlex.join([*flags, '--strategy', choice.strategy])}"
    if arguments.json is not None:
        about = {
            "parameters": net.elements,
            "trained_parameters": net.trained,
            "ranks": config.world_size,
            "micro_batch": None if of_size else micro_batch(config),
            "room": {"device": room.device, "host": room.host, "disk": room.disk},
            "recommended": choice and choice.strategy,
            "reason": verdict,
            "command": command,
        }
        _write_json(as_json(needs, about, arguments.bandwidth, arguments.step_time), arguments.json)
        return int(choice is None)
    console = Console(highlight=False)
    console.print(_heading(config, net, of_size, where), soft_wrap=True)
    if arguments.table:
        print_scaling({count: _at(config, count, net, room, lines) for count in DEVICES}, room.device, console)
    else:
        print_plan(needs, console)
        if config.num_nodes > 1 or arguments.bandwidth is not None:
            print_communication(needs, arguments.bandwidth, arguments.step_time, console)
    console.print(f"recommended, {RULE}:", soft_wrap=True)
    console.print(verdict, soft_wrap=True)
    if command:
        console.print(command, soft_wrap=True)
    return int(choice is None)


def _at(config: Config, devices: int, net: Network, room: Room, lines: Any) -> list[Need]:
    """The plan of so many devices, with the same micro-batch on each."""
    batch_size = micro_batch(config) * devices * config.accumulate
    return survey(replace(config, devices=devices, num_nodes=1, batch_size=batch_size), net, room, lines)


def _parse() -> tuple[Namespace, list[str]]:
    parser = exits.Parser(
        prog="plan.py",
        usage="%(prog)s [--device_memory SIZE] [--host_memory SIZE] [--bandwidth RATE] "
        "[--step_time SECONDS] [--table] [--json [FILE]] [--<option> VALUE ...]",
        description="The memory that a run needs of a rank under each strategy, before anything is launched, and which "
        "one to take.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = "10^9 bytes each GB, 2^30 each GiB; a bare number is GB"
    parser.add_argument(
        "--device_memory",
        metavar="SIZE",
        help=f"memory of one device, such as 80GB or 24GiB ({size}; default: that of this machine's GPU, or without "
        "one its free memory shared out among CPU ranks)",
    )
    parser.add_argument(
        "--host_memory",
        metavar="SIZE",
        help="memory of one machine that a run may take, for what is offloaded (default: this is not looked at)",
    )
    parser.add_argument(
        "--parameters",
        metavar="N",
        help="plan the model states of a network of so many parameters, 100e9, in place of --model",
    )
    parser.add_argument(
        "--bandwidth",
        metavar="RATE",
        help="bandwidth of the slowest link in each direction, such as 100Gbit/s or 12.5GB/s: prints how long each "
        "strategy communicates in a step",
    )
    parser.add_argument(
        "--step_time",
        metavar="SECONDS",
        type=float,
        help="of a step without communication (train.py --devices 1 --batch_size MICRO_BATCH --bench_steps 20 prints "
        "it): tells how long a step takes with it",
    )
    parser.add_argument(
        "--table", action="store_true", help="memory over 1 to 16,384 devices, their micro-batch the same"
    )
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="print JSON, or write it to a file")
    arguments, flags = parser.parse_known_args()
    if arguments.step_time is not None and not 0 < arguments.step_time < float("inf"):
        raise UsageError(f"--step_time must be a number of seconds above 0, not {arguments.step_time:g}")
    if arguments.bandwidth is not None:
        arguments.bandwidth = machine.bytes_per_second(arguments.bandwidth, "--bandwidth")
    elif arguments.step_time is not None:
        raise UsageError("--step_time requires --bandwidth: it is the time of a step without communication")
    if arguments.table and arguments.bandwidth is not None:
        raise UsageError("--table shows memory: it cannot be combined with --bandwidth")
    if arguments.parameters is not None:
        arguments.parameters = _count(arguments.parameters)
        for flag in (flag.split("=")[0] for flag in flags):
            if flag == "--model" or flag.startswith(OF_A_NETWORK):
                raise UsageError(f"{flag}: of a network of --parameters nothing else is known, leave one of both out")
    return arguments, [*flags, *(["--debug"] if arguments.debug else [])]


def _count(text: str) -> int:
    try:
        count = float(text)
    except ValueError:
        count = 0.0
    if not 1 <= count < 1e18:
        raise UsageError(f"--parameters {text}: give a number such as 100e9")
    return round(count)


def _names_batch_size(flags: list[str]) -> bool:
    """Whether a flag or a recipe says it, though it were the default."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--batch_size")
    parser.add_argument("--config", action="extend", nargs="+", default=[])
    given, _ = parser.parse_known_args(flags)
    recipes = (yaml.safe_load(Path(file).read_text()) for file in given.config)  # read by cli.parse already
    return given.batch_size is not None or any("batch_size" in recipe for recipe in recipes)


def _settle(config: Config, arguments: Namespace) -> tuple[Room, str]:
    """Settles devices, accelerator and precision for the machine that is planned for; what a rank may take there, and
    in words whose memory that is."""
    if config.ds_config:
        raise UsageError("--ds_config: a plan is of named strategies, leave it out")
    elsewhere = arguments.device_memory is not None
    gpus = gpu_count() if config.accelerator != "cpu" else 0
    on_gpu = config.accelerator != "cpu" and (elsewhere or gpus > 0)
    if config.accelerator == "gpu" and not on_gpu:
        raise UsageError("--accelerator gpu: there is no GPU here to take the memory of, give --device_memory")
    config.strategy = Config().strategy  # all are looked at
    config.accelerator = "gpu" if on_gpu else "cpu"
    config.devices = max(1, gpus) if config.devices == "auto" else config.devices
    if config.precision == "auto":
        config.precision = "16-mixed" if on_gpu else "32-true"
    disk = None if elsewhere else machine.disk_bytes(config.nvme_path, config.devices)
    host = None
    if arguments.host_memory is not None:
        host = machine.size_in_bytes(arguments.host_memory, "--host_memory") // config.devices
        host = max(0, host - machine.CPU_RANK_BYTES)
    if elsewhere:
        size, whose = machine.size_in_bytes(arguments.device_memory, "--device_memory"), "each device"
    elif on_gpu:
        size, whose = machine.gpu_bytes(config.devices), "this machine's GPU"
    else:
        size = machine.cpu_rank_bytes(config.devices)
        where = f"{gigabytes(size)} GB of this machine's free memory for each CPU rank (--device_memory: another)"
        return Room(size, None, shared=True, disk=disk), where
    usable = round(machine.USABLE * size) if on_gpu else max(0, size - machine.CPU_RANK_BYTES)
    where = f"{gigabytes(usable)} GB of the {gigabytes(size)} GB of {whose}"
    return Room(usable, host, shared=not on_gpu, disk=disk, elsewhere=elsewhere), where


def _heading(config: Config, net: Network, of_size: bool, where: str) -> str:
    model = "a network" if of_size else config.model.name
    trained = "" if net.trained == net.elements else f" ({net.trained:,} trained)"
    ranks = f"{config.world_size} rank{'s'[: config.world_size > 1]}"
    images = "model states alone" if of_size else f"micro-batches of {micro_batch(config)} images"
    return (
        f"{model}, {net.elements:,} parameters{trained}, {config.optimizer.name}, {config.precision}, {ranks}, "
        f"{images}; {where}"
    )


def _write_json(plan: dict[str, Any], file: str) -> None:
    text = json.dumps(plan, indent=1)
    if file == "-":
        print(text)
        return
    try:
        Path(file).write_text(text + "\n")
    except OSError as error:
        raise UsageError(f"--json {file} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(exits.guarded(main))
