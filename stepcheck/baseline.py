"""Saves projections of the audited steps of a script, and compares a later run with them.

Two runs of one script may drift apart, because rounding errors accumulate. So gradients are compared only as long as
both runs have the same weights, bit by bit. The first step that begins with different weights is named. The update
before this step is a fault if its gradients were the same, bit by bit, and if the weights differ by more than 4 units
of roundoff.
"""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepcheck.bounds import EXACT, SIGMAS
from stepcheck.judge import Judge, Step
from stepcheck.sketch import K

KERNELS = 64.0
"""Allowed difference between two gradients relative to their norm, in units of roundoff, because another machine or
release may use other kernels."""

CANCELLED = 0.01
"""This share of the norm of all gradients is added to the norm of a gradient to which KERNELS applies. A gradient that
cancels, such as that of a bias before a batch norm, only has the rounding error of its summands, whose norm a script's
audit does not know. Other kernels changed it by 3.8 times what CANCELLATION allows (torch 2.15 without oneDNN)."""

ENVIRONMENT = ("ATEN_", "CUBLAS_", "CUDA_", "DS_", "MKL_", "NCCL_", "OMP_", "TORCH_")
"""Beginnings of the names of environment variables that may change what is computed."""

STEPS = "steps against the baseline"
"""What a verdict does not judge if the baseline lacks steps, or has other weights."""

PACKAGES = ("torch", "deepspeed", "lightning", "accelerate", "transformers", "numpy")


class Baseline:
    """Saves the steps of all audits of a process, or reads saved ones."""

    def __init__(self, file: str, compare: bool, command: str):
        """Reads the baseline in a file, if `compare` is set.

        Args:
            compare: Whether to compare steps with the baseline. Otherwise `write` adds steps to it.
            command: Command line of the run, which is saved. If another one was saved, the verdicts note this.
        """
        self.file, self.compare = Path(file), compare
        self.about = {"command": command, **_machine(), **_versions()}
        saved: Any = torch.load(file, weights_only=True) if compare else {"about": self.about, "audits": {}}
        self.changed = {
            what: f"{saved['about'].get(what)} in the baseline, {now} in this run"
            for what, now in self.about.items()
            if saved["about"].get(what) != now
        }
        self.audits: dict[str, dict[int, dict[str, Any]]] = saved["audits"]

    def audit(self, name: str) -> "AuditBaseline":
        """Returns the part of the baseline for one audit. Both runs must use the same `name`, and each name only
        once."""
        return AuditBaseline(self.audits.setdefault(name, {}), self.compare, self.changed)

    def write(self) -> None:
        """Adds the steps of this process to the baseline's file, in which other processes of the run may have saved
        theirs. Does nothing if this run compares its steps with the file."""
        if not self.compare:
            others = torch.load(self.file, weights_only=True)["audits"] if self.file.exists() else {}
            written = self.file.with_suffix(".part")
            torch.save({"about": self.about, "audits": others | self.audits}, written)
            written.replace(self.file)  # at once, because other ranks may read the file


class AuditBaseline:
    """Saves the steps of one audit, or compares them with saved ones."""

    def __init__(self, steps: dict[int, dict[str, Any]], compare: bool, changed: dict[str, str]):
        self.steps, self.compare, self.changed = steps, compare, changed
        self.drifts = False  # whether the weights have differed
        self.compared = 0  # steps whose gradients were compared
        self.same_gradients = 0  # the last step whose gradients were the same, up to the rounding of sketches

    def judge(self, judge: Judge, step: Step, gradients: Tensor, deviations: Tensor) -> None:
        """Saves a step, or compares it with the saved step of the same number. If there is none, or its weights have
        other names, the verdict says that the step is not judged against the baseline. Every rank must call it, and
        gets the findings of rank 0. `gradients` and `deviations` are what `Judge.gradients` has returned."""
        weights = step.sums["reference"] / judge.weight_replicas[:, None]
        own = {
            "names": judge.adapter.row_names,
            "gradients": gradients,
            "deviations": deviations,
            "weights": weights,
            "batches": step.batches.clone(),  # of a view, torch.save would write all that it is a view of
        }
        if not self.compare:
            self.steps[step.number] = own
            return
        judge.verdict.notes.update({f"{what} has changed": how for what, how in self.changed.items()})
        # Only rank 0 has saved its engines. Another rank counts them differently if only some ranks train one.
        found = [*self._compare(judge, step.number, own)]
        found, judge.verdict.compared = judge.adapter.ranks.all_gather((found, self.compared))[0]
        for kind, share, text in found:
            judge.verdict.add(step.number, kind, share, text)

    def _compare(self, judge: Judge, step: int, own: dict[str, Any]) -> Iterator[Any]:
        saved: Any = self.steps.get(step)
        if saved is None or saved["names"] != own["names"]:
            why = "does not have them" if saved is None else "has other weights"
            judge.verdict.not_judged.setdefault(STEPS, f"the baseline {why} (first: step {step})")
            return
        names, sizes = own["names"], saved["weights"].norm(dim=1)
        errors = (own["weights"] - saved["weights"]).norm(dim=1)
        if self.drifts or (errors > EXACT * K * sizes).any():
            worst = int((errors / sizes.clamp(min=1e-30)).argmax())
            how = f"by {float(errors[worst] / sizes[worst].clamp(min=1e-30)):.1e} of the norm of {names[worst]}"
            of_one_update = self.same_gradients == step - 1 > 0
            if of_one_update and not self.drifts and errors[worst] > 4 * judge.optimizer_unit * sizes[worst]:
                yield "update", 2.0, f"the last update differs from the baseline's, {how}; its gradients were the same"
            elif not self.drifts:
                judge.verdict.notes["weights drift from the baseline"] = f"from the start of this step on, {how}"
            if not self.compared:
                judge.verdict.not_judged.setdefault(STEPS, f"from step {step} on, the weights differ")
            self.drifts = True
            return
        if not (own["gradients"].any() or saved["gradients"].any()):
            judge.verdict.not_judged["gradients against the baseline"] = "the audit judges none of them"
            return
        self.compared += 1
        size = saved["gradients"].norm(dim=1) + CANCELLED * float(saved["gradients"].norm())
        tolerances = SIGMAS * (own["deviations"] + saved["deviations"]) + (KERNELS * judge.unit * size)[:, None]
        errors = (own["gradients"] - saved["gradients"]).abs()
        if (errors <= EXACT * size[:, None]).all():
            self.same_gradients = step
        shares = (errors / tolerances).amax(1).nan_to_num(nan=torch.inf)
        worst = int(shares.argmax())
        if shares[worst] > 1:
            error = float(errors[worst].norm() / size[worst])
            same = own["batches"].shape == saved["batches"].shape and torch.allclose(own["batches"], saved["batches"])
            cause = "the same weights and batches" if same else "other batches"
            text = (
                f"the gradient of {names[worst]} differs from the baseline's by {error:.2g} of its norm, from {cause}"
            )
            yield "gradient" if same else "batch", float(shares[worst]), text


def _machine() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
    about = {
        "machine": f"{platform.node()}, {platform.machine()}",
        "number of ranks": str(dist.get_world_size() if dist.is_initialized() else 1),
        "number of threads": str(torch.get_num_threads()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "environment": ", ".join(f"{name}={environment[name]}" for name in sorted(environment)),
    }
    if torch.cuda.is_available():
        about |= {"GPU": torch.cuda.get_device_name(), "CUDA": str(torch.version.cuda)}
    return about


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        if package in sys.modules:
            found[package] = importlib.metadata.version(package)
    return found
