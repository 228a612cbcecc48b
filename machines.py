"""What a run over several machines, or one that torchrun starts anew, takes care of: the checkpoint that it goes on
from, and disks that the machines do not share."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

import atomic
import checks
import launchers
import run_folder
from errors import RunError, UsageError
from meeting import Place
from ranks import by_rank_0, gather
from reports.ranks import print_ranks
from resume import newest_of
from resume import settle_resume as settle_resume_here
from sources.console import say
from strategies import STRATEGIES

if TYPE_CHECKING:
    from config import Config

PATIENCE_SECONDS = 3.0
"""How long a machine looks for a file that another has just written; Lightning's is_shared_filesystem waits as long."""

ENDS_BYTES = 2**20
"""Of the beginning and of the end of a checkpoint, by which machines tell whether theirs is the same."""

PIECE_BYTES = 64 * 2**20
"""In which a checkpoint is sent."""


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
        starters = {place.starter for place in places}
        if launchers.by_torchrun() and (own := newest_of(starters, config.out, [config.run_name])):
            config.resume = str(own)
            say(f"Started anew by torchrun: the run goes on from {own}.")
        settle_resume_here(config)
        return config.resume

    config.resume = by_rank_0(settled)
    checks.settle_resumed(config)
    if config.resume and config.num_nodes > 1:
        _bring(Path(config.resume), places)


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
    mine = places[dist.get_rank()]
    seen = gather(_fingerprint(checkpoint) if mine.local_rank == 0 else None)
    lacking = sorted({place.host for place in places if seen[place.rank] not in (None, seen[0])})
    if not lacking:
        return
    size = by_rank_0(lambda: _size(checkpoint, lacking))
    receives = mine.local_rank == 0 and seen[mine.rank] != seen[0]
    failures = gather(_send(checkpoint, size, receives))
    if failure := next(filter(None, failures), ""):
        raise RunError(failure)


def _fingerprint(checkpoint: Path) -> str:
    """Of a file its size, its beginning and its end, where torch's zip file has the checksums of all records; of a
    folder whether it is there."""
    if not checkpoint.is_file():
        return str(checkpoint.exists())
    with checkpoint.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        digest = hashlib.sha256(file.read(ENDS_BYTES))
        file.seek(max(0, size - ENDS_BYTES))
        digest.update(file.read())
    return f"{size} {digest.hexdigest()}"


def _size(checkpoint: Path, lacking: Sequence[str]) -> int:
    if checkpoint.is_dir():
        raise UsageError(
            f"--resume {checkpoint}: {', '.join(lacking)} cannot see it, and it is a folder with a part of each rank: "
            "copy all parts to one place that all machines share"
        )
    return checkpoint.stat().st_size


def _send(checkpoint: Path, size: int, receives: bool) -> str:
    """Sends a file of rank 0, in pieces, so that no rank holds all of it. Each rank must call it.

    Args:
        checkpoint: its path, the same everywhere.
        size: bytes.
        receives: whether this rank writes it.

    Returns:
        What failed here; empty where nothing did. The pieces go on all the same: the others wait for them.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    staged, failures = atomic.staged(checkpoint), list[str]()

    def attempt(act: Callable[[], object]) -> None:
        if failures:
            return
        try:
            act()
        except Exception as error:  # of whatever kind: raised, it would leave the others waiting
            failures.append(f"{checkpoint} cannot be brought to all machines: {socket.gethostname()} says {error}")

    if receives:
        attempt(lambda: checkpoint.parent.mkdir(parents=True, exist_ok=True))
        attempt(lambda: staged.write_bytes(b""))
    for begin in range(0, size, PIECE_BYTES):
        piece = torch.zeros(min(PIECE_BYTES, size - begin), dtype=torch.uint8)
        if dist.get_rank() == 0:
            attempt(partial(_read, checkpoint, begin, piece))
        piece = piece.to(device)
        dist.broadcast(piece, 0)
        if receives:
            attempt(partial(_append, staged, piece.cpu()))
    if receives:
        attempt(lambda: atomic.put_in_place(checkpoint))
    return "".join(failures)


def _read(file: Path, begin: int, piece: Tensor) -> None:
    with file.open("rb", buffering=0) as opened:
        opened.seek(begin)
        part = opened.read(len(piece))
    if len(part) != len(piece):
        raise OSError(f"it has become shorter than {begin + len(piece)} bytes")
    piece.copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))


def _append(file: Path, piece: Tensor) -> None:
    with file.open("ab") as opened:
        opened.write(piece.numpy().data)
