"""Tests configs/cluster/. The SLURM script runs with stubs of SLURM's programs. torchrun's own parser reads the
manifest and the variables that the operator sets."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import config_from_args, parse_args

from cifar_zero.config import command_line
from tests.support.helpers import HANG_SECONDS, ROOT, of_test_all, train_command, wait_until

FOLDER = ROOT / "configs" / "cluster"

SRUN = f"""#!{sys.executable}
import json, os, signal, subprocess, sys, time
command, flags = sys.argv[1:], []
while command[0].startswith("-"):
    flags.append(command.pop(0))
with open(os.environ["SRUN_FLAGS"], "w") as file:
    json.dump(flags, file)
tasks = []
for number in range(int(os.environ["SLURM_NTASKS"])):
    place = {{"SLURM_PROCID": number, "SLURM_LOCALID": 0, "SLURM_NODEID": number, "SLURM_STEP_NUM_NODES": 2}}
    environment = {{**os.environ, **{{name: str(value) for name, value in place.items()}}}}
    environment |= {{"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}}
    environment["SLURM_STEP_NUM_TASKS"] = os.environ["SLURM_NTASKS"]
    tasks.append(subprocess.Popen(command, env=environment))
signal.signal(signal.SIGUSR1, lambda *_: tasks[-1].send_signal(signal.SIGUSR1))
bad = 0
while any(task.poll() is None for task in tasks):
    bad = bad or next((task.returncode for task in tasks if task.returncode), 0)
    if bad and "--kill-on-bad-exit=1" in flags:
        [task.kill() for task in tasks if task.returncode is None]
    time.sleep(0.005)
bad = bad or next((task.returncode for task in tasks if task.returncode), 0)
sys.exit(bad if bad >= 0 else 128 - bad)
"""
"""Starts one task on each of two nodes and forwards the signal of --signal, as slurmstepd does. Only the last task gets
it here, because the first task may get it after the ranks have agreed to stop. With --kill-on-bad-exit=1 it ends the
other tasks when one fails. It ends them at once, whereas SLURM gives them some seconds."""

SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then echo localhost; else echo "$@" >> "$REQUESTS"; fi
"""

JOB = {
    "SLURM_JOB_ID": "4217",
    "SLURM_JOB_NAME": "cifar-zero",
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_NODELIST": "localhost",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_CPUS_PER_TASK": "8",
}


def ended_by_slurm(folder: Path, run: Path, flags: list[str], data: str, **more: str) -> str:
    """Starts the script as SLURM does. Sends the job SIGUSR1 once its run has a checkpoint, and returns what the job
    has printed."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    variables = {"RUNS": str(folder / "runs"), "DATA": data, "PYTHON": sys.executable}
    variables |= {"REQUESTS": str(folder / "requests"), "SRUN_FLAGS": str(folder / "flags.json")}
    variables |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    job = subprocess.Popen(
        ["bash", str(FOLDER / "slurm.sbatch"), *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **JOB, **variables, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: [*run.glob("checkpoints/*.ckpt")] or job.poll() is not None)
    job.send_signal(signal.SIGUSR1)
    said = job.communicate(timeout=HANG_SECONDS)[0]
    assert job.returncode == 128 + signal.SIGUSR1, said[-3000:]
    return said


@of_test_all
@pytest.mark.distributed
def test_a_slurm_job_is_requeued_and_resumes(small_data: list[str], tmp_path: Path):
    *small, _, data = small_data
    flags = [*small, "--batch_size", "16", "--accelerator", "cpu", "--strategy", "ddp", "--epochs", "10000"]
    flags += ["--save_every_n_steps", "2"]
    runs = tmp_path / "runs" / "cifar-zero-4217"
    said = ended_by_slurm(tmp_path, runs / "version_0", flags, data)
    assert (tmp_path / "requests").read_text() == "requeue 4217\n"
    assert (runs / "version_0" / "checkpoints" / "last.ckpt").exists()
    assert f"saved; resume with: {train_command()} --resume {runs}" in said
    flags_of_srun = json.loads((tmp_path / "flags.json").read_text())
    assert flags_of_srun == ["--kill-on-bad-exit=1", "--cpus-per-task=8"]
    ended_by_slurm(tmp_path, runs / "version_1", flags, data, SLURM_RESTART_COUNT="1")
    assert str(runs / "version_0") in (runs / "version_1" / "config.yaml").read_text()


def pytorchjob() -> tuple[dict[str, Any], dict[str, Any], list[str], dict[str, str]]:
    """Returns the manifest, its pod, its command, and what the operator sets (pkg/controller.v1/pytorch/elastic.go)."""
    job = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
    elastic, pod = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    variables = {"PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}"}
    variables |= {"PET_RDZV_BACKEND": elastic["rdzvBackend"], "PET_RDZV_ENDPOINT": "cifar-zero-worker-0:23456"}
    return job, pod, pod["containers"][0]["command"], variables


def trainjob() -> tuple[dict[str, Any], dict[str, Any], list[str], dict[str, str]]:
    """Returns the same values for Kubeflow Trainer (v2.3, pkg/runtime/framework/plugins/torch)."""
    runtime, job = yaml.safe_load_all((FOLDER / "trainjob.yaml").read_text())
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["containers"][0]["resources"] = trainer["resourcesPerNode"]
    variables = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    return job, pod, trainer["command"], variables


@pytest.mark.parametrize("manifest", [pytorchjob, trainjob])
def test_torchrun_and_train_py_accept_the_command_of_the_manifest(
    manifest: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
):
    job, pod, (program, *flags), variables = manifest()
    (container,) = pod["containers"]
    variables |= {variable["name"]: variable["value"] for variable in container["env"]}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert program == "torchrun"
    options = parse_args(flags)
    assert (
        options.nnodes.split(":")[-1],
        options.nproc_per_node,
        options.training_script,
    ) == ("2", "8", "train.py")
    # torchrun waits for the last checkpoint almost as long as the pod does.
    grace = pod["terminationGracePeriodSeconds"]
    assert grace - 20 < (config_from_args(options)[0].shutdown_timeout or 0) < grace
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounts = container["volumeMounts"]
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["volumes"]}
    config = command_line.parse(options.training_script_args)
    assert {config.data.root, config.output.out} <= {mount["mountPath"] for mount in mounts}
    # The pods start again together, and resume.
    assert (config.output.resume, config.output.name) == ("auto", job["metadata"]["name"])
    assert config.recipe.batch_size % (8 * 2) == 0


@pytest.mark.distributed
@of_test_all
def test_launchers_of_the_guides(small_data: list[str], tmp_path: Path):
    """Every command runs for a few steps, as written but for float16, which needs a GPU. Both nodes of torchrun's
    commands are this machine."""
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("cluster.md", "migrate.md"))
    commands = re.findall(r"^(?:\.venv/bin/)?((?:torchrun|deepspeed) .+)$", pages, re.MULTILINE)
    assert len(commands) >= 5
    small = ["--accelerator", "cpu", "--max_steps", "4", "--out", str(tmp_path), *small_data]
    for line in commands:
        program, *arguments = shlex.split(line)
        if not shutil.which("numactl"):
            arguments = [word for word in arguments if word != "--bind_cores_to_rank"]
        arguments = ["bf16-mixed" if word == "16-mixed" else word for word in arguments]
        trains = "train.py" in arguments
        started = [str(Path(sys.executable).parent / program), *arguments, *(small if trains else [])]
        nodes = [
            subprocess.Popen(
                started,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(2 if program == "torchrun" else 1)
        ]
        for node in nodes:
            said = node.communicate(timeout=HANG_SECONDS)[0]
            assert node.returncode == 0, f"{line}\n{said[-3000:]}"
