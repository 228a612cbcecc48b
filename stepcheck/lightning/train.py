"""Trains cases of `stepcheck module` on this rank under Lightning's Trainer."""

import copy
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from stepcheck.engines.adapter import RankInfo
from stepcheck.lightning.callback import StepCheck
from stepcheck.lightning.case import QUIET, ModuleCase
from stepcheck.lightning.resume import StateRecorder, differences
from stepcheck.lightning.user_classes import build_parts, fit
from stepcheck.strategies import ZERO
from stepcheck.usage import UsageError, short
from stepcheck.verdict import Verdict

BUCKET = 200_000_000
"""Lightning's default size of DeepSpeed's buckets, in elements. They are allocated in full even for a small module."""


EPOCHS = 1000
"""More epochs than any training here has."""


def train_case(fields: dict[str, Any], device: torch.device, folder: Path) -> dict[str, Any]:
    """Trains a case. Returns the verdict as plain data. If user code or a flag is refused, returns only `refused`, a
    line that says why."""
    try:
        verdict = train_and_judge(ModuleCase(**fields), device, folder)
    except UsageError as error:
        return {"refused": str(error)}
    return verdict.as_dict()


def train_and_judge(case: ModuleCase, device: torch.device, folder: Path) -> Verdict:
    """Trains a case and returns its verdict. If a replay differs, trains once more, to find the first module whose
    output differs.

    With `resume_at`, trains to the end once, and then once more from the checkpoint of this step. Returns the verdict
    of the resumed run, with its differences from the first. If the first run has a fault or is not judged, returns its
    verdict and resumes nothing.
    """
    if case.resume_at:
        saved = StateRecorder(case.resume_at, folder / f"{str(case).replace('/', '_')}.ckpt")
        before = _train(case, device, folder, saved)
        if not saved.first:
            before.not_judged["the resumed run"] = f"the training ended before step {case.resume_at + 1}"
        for own in RankInfo.current().all_gather(before.not_judged):  # all ranks resume, or none
            before.not_judged = own | before.not_judged
        if before.outcome == "different" or before.not_judged:
            return before
        resumed = StateRecorder(random=saved.random)
        verdict = _train(case, device, folder, resumed, checkpoint=saved.checkpoint)
        verdict.findings = differences(saved, resumed) + verdict.findings
        return verdict
    verdict = _train(case, device, folder)
    if any(each.kind.startswith("replayed") for each in verdict.findings):
        again = _train(case, device, folder, outputs=True)
        verdict = again if again.findings else verdict
    return verdict


def _train(
    case: ModuleCase,
    device: torch.device,
    folder: Path,
    *callbacks: Callback,
    checkpoint: Path | None = None,
    outputs: bool = False,
) -> Verdict:
    """Trains a case once, resumed from `checkpoint` if given. With `outputs`, replays compare the outputs of
    submodules."""
    replays: dict[str, Any] = {"count": case.replayed}
    if case.resume_at and case.replayed:
        replays = {"steps": (1, case.resume_at + 1)}
    step_check = StepCheck(**replays, outputs=outputs, on_fault="warn")
    seed_everything(case.seed, verbose=False)
    module, data = build_parts(case.options)
    trainer = _trainer(case, module, device, folder, [*callbacks, step_check, StopAfterSteps(case)])
    seed_everything(case.seed, verbose=False)
    with reproducible_kernels():
        fit(trainer, module, data, checkpoint)
    verdict = step_check.verdict
    del trainer, module, data, step_check
    gc.collect()
    return verdict


@contextmanager
def reproducible_kernels() -> Iterator[None]:
    """Context manager that makes cuDNN deterministic and turns TF32 off. With TF32, the tolerances on a GPU would be a
    thousand times as wide (torch's "CUDA semantics"). Settings that the module changes are restored at the end."""
    cudnn: Any = torch.backends.cudnn
    conv, rnn = (getattr(cudnn, name, None) for name in ("conv", "rnn"))  # not before torch 2.9
    owners: Any = torch.backends, cudnn, conv, rnn, torch.backends.cuda.matmul
    with cudnn.flags(enabled=True, deterministic=True, benchmark=False, allow_tf32=False):
        before = [(each, each.fp32_precision) for each in owners if hasattr(each, "fp32_precision")]
        try:
            yield
        finally:  # otherwise `flags` finds settings of different kinds, and raises an error (torch 2.15)
            for each, value in before:
                each.fp32_precision = value


def _trainer(case: ModuleCase, module: Any, device: torch.device, folder: Path, callbacks: list[Callback]) -> Trainer:
    """Returns a Trainer without output, but with a logger, which a module may need. It validates on one batch, because
    a schedule may need a metric of the validation. Raises UsageError if an option of --trainer is wrong."""
    own: dict[str, Any] = {
        "accelerator": "gpu" if device.type == "cuda" else "cpu",
        "devices": case.ranks,
        "strategy": _strategy(case, module, device),
        "plugins": LightningEnvironment(),
        "precision": case.precision,
        "accumulate_grad_batches": case.accumulate,
        "gradient_clip_val": case.clip or None,
        # With max_steps, a run that is resumed at the end of an epoch ends the next epoch after one batch (Lightning
        # 2.6.6, fit_loop.on_run_start does not count the epoch).
        **({"max_epochs": EPOCHS} if case.resume_at else {"max_steps": case.steps}),
        "callbacks": callbacks,
    }
    usual = {
        **QUIET,
        "logger": DummyLogger(),
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    try:
        return Trainer(**own, **usual | case.trainer)
    except (TypeError, ValueError) as error:  # also of an option that has a flag of its own
        raise UsageError(f"--trainer: {short(error, 300)}") from error


def _strategy(case: ModuleCase, module: Any, device: torch.device) -> Any:
    if case.strategy == "ddp":
        return DDPStrategy(find_unused_parameters=True)
    from stepcheck.lightning.strategy import CPUDeepSpeedStrategy  # here, because it imports DeepSpeed

    build = DeepSpeedStrategy if device.type == "cuda" else CPUDeepSpeedStrategy
    if case.config:
        return build(config=copy.deepcopy(case.config))  # the strategy changes it
    stage, offload = ZERO[case.strategy]
    elements = min(BUCKET, sum(each.numel() for each in module.parameters()) or BUCKET)
    elements += elements % 2  # ZeRO 1 and 2 require an even number (DeepSpeed 0.19.8, nccl_start_alignment_factor)
    return build(
        stage=stage,
        offload_optimizer=offload,
        offload_parameters=offload and stage == 3,
        reduce_bucket_size=elements,
        allgather_bucket_size=elements,
    )


class StopAfterSteps(Callback):
    """Ends the training after the case's steps, and frees DeepSpeed's engine before the next case. Raises UsageError if
    an epoch would end within an optimizer step."""

    def __init__(self, case: ModuleCase):
        self.case = case

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parts, batches = self.case.accumulate, trainer.num_training_batches
        if batches < math.inf and batches % parts and self.case.steps * parts >= batches:
            raise UsageError(
                f"--accumulate {parts} does not divide the {batches} batches of an epoch. Plain PyTorch would end the "
                "epoch with a smaller step, and DeepSpeed would finish this step in the next epoch: add "
                f"--trainer.limit_train_batches {batches // parts * parts}"
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.case.steps

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        engine = trainer.strategy.model
        if hasattr(engine, "basic_optimizer"):
            from stepcheck.engines.deepspeed import free

            free(engine)
