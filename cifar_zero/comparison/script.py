"""`cifar-zero compare --script OLD.py`: does a LightningModule train as an old training script does?

The script is run once, unchanged, and its first optimizer steps are recorded. Then the module is trained from the
script's weights on its batches, under plain PyTorch and under each strategy. Every step is checked twice: the module
computes the script's step, and the strategy the module's.
"""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cifar_zero.comparison import own_module
from cifar_zero.comparison.result import Variant
from cifar_zero.config import command_line
from cifar_zero.core.console import command, say
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.training import run_process
from cifar_zero.training.resolve import resolve

FOLDER = "recording"
"""Directory of the recorded steps, in that of the comparison."""

RECORDER = ("cifar_zero.comparison.trace",)


@dataclass
class Recording:
    """What a script's training is, in plain data."""

    model: str = ""  # name of its class
    steps: int = 0  # recorded optimizer steps
    accumulate: int = 1  # micro-batches in each
    batch_size: int = 1  # samples of a micro-batch
    precision: str = "32-true"  # of autocast, by Lightning's names
    gradient_clip_val: float = 0.0  # norm to which it clips with torch's function, else 0
    renames: dict[str, str] = field(default_factory=dict)  # new beginnings of names, by the old ones
    own_data: bool = False  # the module trains on its own loader
    is_recipe: bool = False  # the module is CIFARModule, not a user's

    def write(self, folder: Path) -> None:
        """Writes it next to the steps."""
        (folder / "recording.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(folder: Path) -> "Recording":
        """Returns what `write` has written."""
        return Recording(**json.loads((folder / "recording.json").read_text()))


def record(script: str, steps: int, folder: Path) -> Recording:
    """Runs a script with its arguments, `script`, up to its optimizer step `steps`. Raises UsageError: it cannot be
    recorded, and RunError: it fails."""
    file, *arguments = shlex.split(script)
    if not Path(file).is_file():
        raise UsageError(f"--script {file} does not exist")
    recording, log = folder / FOLDER, folder / "script.log"
    recording.mkdir()
    # Compiled functions cannot be looked into: they run as they are written. On the CPU the ranks have a thread each
    # (`jobs.train_all`), and with several torch adds up in another order.
    environment = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    if "deepspeed" in Path(file).read_text(errors="replace"):  # which asks MPI for what it does not find here
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        environment |= {name: value for name, value in rank.items() if name not in os.environ}
    say(f"{file}: recording {steps} optimizer steps, its output is in {log}")
    with run_process.start(RECORDER, [str(recording), str(steps), file, *arguments], log, environment) as child:
        code = child.wait()
    if code:
        error = run_process.failure(log, code)
        raise UsageError(error) if code == 2 and error.startswith("--script") else RunError(f"--script {file}: {error}")
    return Recording.read(recording)


def plan(recording: Recording, strategies: Sequence[str], ranks: int, flags: Sequence[str]) -> list[Variant]:
    """Returns the trainings: plain PyTorch on one rank, then the strategies on `ranks`, by default all of DeepSpeed's
    that can train here. Raises UsageError.

    Args:
        recording: The script's; what its training is, is the module's too, unless `flags` say otherwise.
        strategies: Names, or raw DeepSpeed configurations.
        ranks: Number of ranks; each has its part of every micro-batch.
        flags: --module and what `own_module.plan` takes, or flags of train for CIFARModule.
    """
    if recording.batch_size % ranks:
        raise UsageError(f"--devices {ranks} does not divide the {recording.batch_size} samples of a batch of --script")
    common = ["--max_steps", str(recording.steps), "--precision", recording.precision]
    common += ["--accumulate", str(recording.accumulate)]
    if recording.gradient_clip_val:
        common += ["--gradient_clip_val", str(recording.gradient_clip_val)]
    if recording.is_recipe:
        batch = recording.batch_size * recording.accumulate
        common += ["--data.source", "synthetic", "--data.synthetic_size", str(batch * recording.steps)]
        common += ["--data.val_fraction", "0", "--batch_size", str(batch), "--epochs", str(recording.steps)]
    given = [*common, *flags]
    others = [name for name in strategies if name != "baseline"]
    if recording.is_recipe:
        cases = _recipes(["baseline"], 1, given)
    else:
        cases = own_module.plan(["baseline"], 1, (), given, needs_data=recording.own_data)
    # A strategy orders the samples of its ranks in its own way, so that a module's own data are compared on one rank.
    if recording.own_data or (strategies and not others):
        return cases
    if recording.is_recipe:
        return cases + _recipes(others or own_module.DEFAULT, ranks, given, optional=not others)
    return cases + own_module.plan(others, ranks, (), given, needs_data=False)


def _recipes(names: Sequence[str], ranks: int, flags: Sequence[str], optional: bool = False) -> list[Variant]:
    """Returns a case of CIFARModule for each strategy; `optional` ones are left out if they cannot train here."""
    cases = []
    for name in names:
        given = [*flags, *command_line.strategy_flags(name), "--devices", str(ranks)]
        try:
            resolve(command_line.parse(given))
        except UsageError:
            if not optional:
                raise
            continue
        title = Path(name).stem
        cases.append(Variant(title, title, ranks, given, command("train", *given), row="CIFARModule"))
    return cases
