"""What a run over several machines, or one that torchrun starts anew, takes care of: the checkpoint that it goes on
from, and disks that the machines do not share."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

import atomic
import launchers
import run_folder
from errors import UsageError
from meeting import Place
from ranks import by_rank_0, gather
from reports.ranks import print_ranks
from resume import settle_resume as settle_resume_here
from sources.console import say
from strategies import STRATEGIES

if TYPE_CHECKING:
    from config import Config

PATIENCE_SECONDS = 3.0
"""How long a machine looks for a file that another has just written; Lightning's is_shared_filesystem waits as long."""


def settle_resume(config: Config, places: Sequence[Place]) -> None:
    """Puts the checkpoint that the run goes on from, the same on all ranks, and brings it to machines that lack it.

    After torchrun has started the ranks anew that is the newest one of this very run, whatever --resume names; before
    the first one is written the run begins again.

    Args:
        config: of the run, settled by `checks.settle`.
        places: of all ranks, as `meeting.meet` returns them.

    Raises:
        UsageError: there is none, or it is of another run; on all ranks.
    """
    if config.num_nodes == 1 and not launchers.by_torchrun():
        return

    def settled() -> str:
        if launchers.by_torchrun() and (own := newest_of_these(config, places)):
            config.resume = str(own)
            say(f"Started anew by torchrun: the run goes on from {own}.")
        settle_resume_here(config)
        return config.resume

    config.resume = by_rank_0(settled)
    if config.resume:
        _bring(Path(config.resume), places)


def newest_of_these(config: Config, places: Sequence[Place]) -> Path | None:
    """The newest checkpoint that the same launchers' earlier ranks have written; None before there is one.

    A launcher is known by its process: torchrun's restart count stays as it was when a machine joins, and is 0 on one
    that has just come.
    """
    starters = {place.starter for place in places if place.starter}
    found: list[Path] = []
    for suffix in ("", run_folder.FALLBACK_SUFFIX):
        for file in Path(config.out, config.run_name + suffix).glob(f"version_*/{run_folder.RANKS}"):
            if starters & {place["starter"] for place in json.loads(file.read_text())}:
                atomic.recover(file.parent)
                found += run_folder.checkpoints(file.parent)
    return max(found, key=run_folder.written, default=None)


def introduce(config: Config, places: Sequence[Place], run_dir: Path | None) -> None:
    """Says and notes in the run folder where the ranks are, and finds out whether all machines see that folder.

    Args:
        config: of the run, settled by `checks.settle`.
        places: of all ranks.
        run_dir: the run folder, on rank 0.

    Raises:
        UsageError: they do not, and the strategy would leave its shards on a disk each; on all ranks.
    """
    if config.num_nodes == 1 and not launchers.by_torchrun():
        return
    text = json.dumps([asdict(place) for place in places], indent=1) + "\n"
    if run_dir is not None:
        file = run_dir / run_folder.RANKS
        atomic.staged(file).write_text(text)
        atomic.put_in_place(file)
    if config.num_nodes == 1:
        return
    if run_dir is not None:
        print_ranks(places)
    folder = by_rank_0(lambda: run_dir)
    assert folder is not None
    seen = gather(_appears(folder / run_folder.RANKS, text))
    apart = sorted({place.host for place in places if not seen[place.rank]})
    if not apart:
        return
    where = f"--out {config.out} is not one directory for all machines: {', '.join(apart)} cannot see {folder}"
    deepspeed = bool(config.ds_config) or STRATEGIES[config.strategy].family == "deepspeed"
    if deepspeed and not config.only_measures:
        raise UsageError(
            f"{where}, and the checkpoints of {config.strategy_name} would lie in pieces: name a directory that they "
            "share, or take --strategy ddp or fsdp2, which write one file"
        )
    if run_dir is not None:
        say(f"{where}. What the run leaves behind is on {places[0].host} alone.")


def _appears(file: Path, text: str) -> bool:
    over = time.monotonic() + PATIENCE_SECONDS
    while not (seen := file.is_file() and file.read_text() == text) and time.monotonic() < over:
        time.sleep(0.1)
    return seen


def _bring(checkpoint: Path, places: Sequence[Place]) -> None:
    """Gives a checkpoint of one file to the machines that lack it, or have another run's there, at its own place."""
    seen = gather(_digest(checkpoint))
    lacking = sorted({place.host for place in places if seen[place.rank] != seen[0]})
    if not lacking:
        return
    content = by_rank_0(lambda: _content(checkpoint, lacking))
    mine = places[dist.get_rank()]
    if seen[mine.rank] != seen[0] and mine.local_rank == 0:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        atomic.staged(checkpoint).write_bytes(content)
        atomic.put_in_place(checkpoint)
    dist.barrier()


def _digest(checkpoint: Path) -> str:
    """Of a file; whether it is there, of a folder."""
    if not checkpoint.is_file():
        return str(checkpoint.exists())
    with checkpoint.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _content(checkpoint: Path, lacking: Sequence[str]) -> bytes:
    if checkpoint.is_dir():
        raise UsageError(
            f"--resume {checkpoint}: {', '.join(lacking)} cannot see it, and it is a folder with a part of each rank: "
            "copy all parts to one place that all machines share"
        )
    return checkpoint.read_bytes()
