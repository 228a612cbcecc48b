"""`cifar-zero compare --script OLD.py` checks whether a LightningModule trains as an old training script does.

The script is run once, unchanged, and its first optimizer steps are recorded. Then the module is trained from the
script's weights on the script's batches, under plain PyTorch and under each strategy. Every step is checked twice. The
module must compute the same values as the script, and the strategy must compute the same values as the module.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from cifar_zero.comparison import own_module
from cifar_zero.comparison.cases import cases_by_strategy, resolved
from cifar_zero.comparison.recording import RECORDING, Recording
from cifar_zero.comparison.result import Variant
from cifar_zero.config import command_line
from cifar_zero.config.user_classes import check_options, read_given
from cifar_zero.core.console import say
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.core.usage import words_of
from cifar_zero.training import run_process


def check(script: str, rest: Sequence[str], module: Sequence[str]) -> Path:
    """Checks a command line before the script runs, which may take minutes. Returns the path of the script.

    Args:
        script: Path of the script, followed by its arguments.
        rest: Options of train, and arguments of the user's classes.
        module: --module and --datamodule, or nothing if this project's module is trained.

    Raises:
        UsageError: If the script does not exist, or an option is refused.
    """
    file, *arguments = words_of("--script", script)
    if not Path(file).is_file():
        raise UsageError(f"--script {file} does not exist")
    try:
        if module:
            given = read_given([*rest, *module])
            check_options(given)
            command_line.settings_of_arguments(given.ours)
        else:
            command_line.parse(rest)
    except UsageError as error:
        if arguments or not rest:
            raise
        quoted = f"--script '{file} {' '.join(rest)}'"
        raise UsageError(f"{error}; arguments of the script must be in its quotes: {quoted}") from error
    return Path(file)


def record(script: str, steps: int, folder: Path) -> Recording:
    """Runs a script and records its first optimizer steps.

    Args:
        script: Path of the script, followed by its arguments. `check` must have accepted it.
        steps: Number of steps to record. The script is ended after the last recorded step.
        folder: Receives the recording and the log.

    Raises:
        UsageError: If the script cannot be recorded.
        RunError: If the script fails.
    """
    file, *arguments = words_of("--script", script)
    recording, log = folder / RECORDING, folder / "script.log"
    recording.mkdir()
    # Compilation is off, because calls within compiled functions cannot be recorded. The script has one thread, as a
    # rank on the CPU has (`jobs.train_jobs`), because with several threads torch sums in another order.
    environment = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    if "deepspeed" in Path(file).read_text(errors="replace"):  # DeepSpeed uses MPI where these are missing
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        environment |= {name: value for name, value in rank.items() if name not in os.environ}
    say(f"{file}: recording {steps} optimizer steps; the output of the script is in {log}")
    program = ["cifar_zero.comparison.trace"]
    with run_process.start(program, [str(recording), str(steps), file, *arguments], log, environment) as child:
        code = child.wait()
    if code:
        error = run_process.failure(log, code)
        raise UsageError(error) if code == 2 and error.startswith("--script") else RunError(f"--script {file}: {error}")
    return Recording.read(recording)


def plan(recording: Recording, strategies: Sequence[str], ranks: int, flags: Sequence[str]) -> list[Variant]:
    """Returns the cases to train. The first case is plain PyTorch on one rank. The strategies on `ranks` ranks follow.

    Args:
        recording: The script's steps. The module has the same precision, accumulation and clipping, unless
            `flags` override them.
        strategies: Names of strategies, or raw DeepSpeed configurations. The default is every strategy in
            `own_module.DEFAULT` that can train on this machine.
        ranks: Number of ranks. Each trains on its part of every micro-batch.
        flags: Flags of `own_module.plan` if there is a --module, otherwise flags of train.

    Raises:
        UsageError: If `ranks` does not divide a micro-batch, the script draws random numbers and there are several
            ranks, a flag is refused, or a given strategy cannot train.
    """
    if recording.batch_size % ranks:
        raise UsageError(f"--devices {ranks} does not divide the {recording.batch_size} samples of a batch in --script")
    if recording.draws and ranks > 1:
        raise UsageError(
            f"--devices {ranks}: the model of --script draws random numbers, as dropout does, and {ranks} ranks draw "
            "others, so no step could be judged: use --devices 1, or set dropout to 0"
        )
    common = ["--max_steps", str(recording.steps), "--precision", recording.precision]
    common += ["--accumulate", str(recording.accumulate)]
    if recording.gradient_clip_val:
        common += ["--gradient_clip_val", str(recording.gradient_clip_val)]
    is_recipe = "--module" not in flags
    if is_recipe:
        batch = recording.batch_size * recording.accumulate
        common += ["--data.source", "synthetic", "--data.synthetic_size", str(batch * recording.steps)]
        common += ["--data.val_fraction", "0", "--batch_size", str(batch), "--epochs", str(recording.steps)]
    given = [*common, *flags]

    def cases(names: Sequence[str], ranks: int, needs_data: bool) -> list[Variant]:
        if is_recipe:
            return cases_by_strategy(names, own_module.DEFAULT, ranks, given, "CIFARModule", resolved)
        return own_module.plan(names, ranks, (), given, needs_data)

    plain = cases(["baseline"], 1, recording.own_data)
    others = [name for name in strategies if name != "baseline"]
    # Strategies distribute samples over ranks in different orders, so a module's own data are compared on one rank.
    if recording.own_data or (strategies and not others):
        return plain
    return plain + cases(others, ranks, needs_data=False)
