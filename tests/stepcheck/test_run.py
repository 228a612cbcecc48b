"""`stepcheck run` as a user runs it: on a script that knows nothing of it. With `--save` and `--against`, what changes
between two runs of a script is found where it begins."""

import argparse
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from stepcheck import __all__ as public_names
from stepcheck.__main__ import main
from stepcheck.report import write_files
from tests.support.suite import ROOT, run_python

SCRIPT = "tests/stepcheck/loop.py"

PLANT = """
import torch
real = torch.optim.AdamW.step
def step(self, *args, **more):
    real(self, *args, **more)
    self.param_groups[0]["params"][1].data.mul_(1.01)
torch.optim.AdamW.step = step
"""


@pytest.mark.distributed
def test_the_first_fault_ends_all_ranks(tmp_path: Path):
    """A sitecustomize.py of the user's runs too: here it plants the fault."""
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    report, junit = tmp_path / "new" / "verdict.json", tmp_path / "junit.xml"
    launcher = ["torchrun", "--standalone", "--nproc_per_node", "2"]
    options = ["--json", str(report), "--junit", str(junit)]
    command = ["-m", "stepcheck", "run", *options, *launcher, SCRIPT, "--engine", "ddp", "--steps", "50"]
    done = run_python(*command, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "stepcheck: step 1: the update of conv.weight is off by" in done.stdout
    (engine,) = json.loads(report.read_text())["engines"]
    assert engine["findings"][0]["step"] == 1
    (failure,) = ElementTree.parse(junit).getroot().iter("failure")
    assert "conv.weight" in failure.attrib["message"]
    assert "torchrun" in str(failure.text)


def test_keep_going_lets_the_script_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "sitecustomize.py").write_text(PLANT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["run", "--keep_going", "--json", str(tmp_path / "verdict.json"), str(ROOT / SCRIPT)]) == 1
    assert json.loads((tmp_path / "verdict.json").read_text())["exit_code"] == 1
    printed = capfd.readouterr().out
    assert "loss " in printed
    assert "3 steps audited" in printed


@pytest.mark.distributed
@pytest.mark.parametrize("audited", [True, False])
def test_ranks_of_several_commands(audited: bool, tmp_path: Path):
    """As on several nodes, of which DeepSpeed's launcher starts the others without stepcheck."""
    waits_not = "from stepcheck import audited_ranks\naudited_ranks.RANKS_SECONDS = 0.0\n"
    (tmp_path / "sitecustomize.py").write_text(waits_not)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}

    def run(rank: int) -> Any:
        command = [SCRIPT, "--engine", "ddp", "--steps", "2"]
        if rank == 0 or audited:
            command = ["-m", "stepcheck", "run", *command]
        own = {} if audited or rank else {"PYTHONPATH": str(tmp_path)}
        return run_python(*command, env={**shared, **own, "RANK": str(rank), "LOCAL_RANK": "0"})

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, (0, 1))
    assert "loss " in first.stdout, first.stdout + first.stderr
    assert (first.returncode, second.returncode) == (0 if audited else 1, 0), first.stderr + second.stderr
    assert ("2 steps audited" in first.stdout) == audited
    assert ("1 of 2 ranks run without stepcheck" in first.stdout) == (not audited)
    assert ("the verdict is printed where rank 0 runs" in second.stdout) == audited


SIGNALS = """
import os, signal

for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    os.kill(os.getppid(), number)
    print("got", signal.sigwait([number]).name)
"""


def test_signals_of_a_scheduler_reach_the_script(tmp_path: Path):
    (tmp_path / "script.py").write_text(SIGNALS)
    defaults = "[signal.signal(each, signal.SIG_DFL) for each in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)]"
    command = f"import signal\nfrom stepcheck.__main__ import main\n{defaults}\nmain(['run', 'script.py'])"
    done = run_python("-c", command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.stdout.splitlines()[:3] == ["got SIGHUP", "got SIGUSR1", "got SIGUSR2"], done.stderr


@pytest.mark.parametrize(("source", "code"), [("", 1), ("raise SystemExit(7)", 7)])
def test_a_script_without_an_audited_step_is_no_success(
    source: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "script.py").write_text(source)
    assert main(["run", str(tmp_path / "script.py")]) == code
    assert "no step was audited" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "SCRIPT"),
        (["nowhere.py"], "nowhere.py is not a file"),
        (["nolauncher", "train.py"], "nolauncher"),
        (["--every", "0", SCRIPT], "--every"),
        (["--json", ".", SCRIPT], "--json"),
        (["--junit", f"{ROOT / SCRIPT}/new/junit.xml", SCRIPT], "--junit"),
        (["--save", f"{ROOT / SCRIPT}/before.pt", SCRIPT], "before.pt cannot be written (File exists); give another"),
        (["--unknown", SCRIPT], "--unknown"),
        (["--against", "missing.pt", SCRIPT], "--against: missing.pt is not a file"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["run", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_file_that_cannot_be_written_costs_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    json_file, junit, save, saved = (tmp_path / name for name in ("no folder/a.json", "junit.xml", "b.pt", "saved.pt"))
    saved.touch()
    options = argparse.Namespace(json=json_file, junit=junit, save=save)
    assert write_files(options, True, [], {"file": str(saved), "compare": False}) == 1
    assert capsys.readouterr().err == f"stepcheck: --json: {json_file} cannot be written: No such file or directory\n"
    assert junit.is_file()
    assert save.is_file()


WITHOUT_TORCH = """
import sys
import stepcheck.attach
from stepcheck.__main__ import main

assert main(["accept", "--print_cases"]) == 0
assert main(["module", "tests/users_code/own_code.py:Missing"]) == 2
sys.exit("torch" in sys.modules)
"""


def test_what_needs_no_torch_does_not_import_it():
    done = run_python("-c", WITHOUT_TORCH)
    assert done.returncode == 0, done.stderr
    assert "deepspeed_stage_3: all parameters sharded\n  ZeRO 3: gathering" in done.stdout


def test_the_library_knows_nothing_of_the_other_package():
    """No module of stepcheck imports what only the other package needs."""
    for name in public_names:  # a module of this name would hide it
        assert not (ROOT / "stepcheck" / f"{name}.py").exists(), name
    unwanted = ("cifar_zero", "cifar_module", "datamodule", "lightning", "torchvision", "jsonargparse", "rich")
    for path in (ROOT / "stepcheck").rglob("*.py"):
        words = [
            line.split() for line in path.read_text().splitlines() if line.lstrip().startswith(("import ", "from "))
        ]
        imported = {word[1].split(".")[0] for word in words}
        if path.is_relative_to(ROOT / "stepcheck" / "lightning"):
            imported -= {"lightning", "jsonargparse"}
        if path.relative_to(ROOT / "stepcheck").as_posix() in ("accept/frameworks.py", "script/check.py"):
            imported -= {"lightning"}
        assert not imported.intersection(unwanted), path


FOUR_STEPS = ["tests/stepcheck/loop.py", "--steps", "4"]

LOSS = """
import torch.nn.functional as F
real = F.cross_entropy
F.cross_entropy = lambda *args, **more: real(*args, **more) * 1.0001
"""
BATCHES = """
import torch
real = torch.randint
torch.randint = lambda low, high, *args, **more: real(low, high - (high == 97), *args, **more)
"""
OPTIMIZER = """
import torch
real = torch.optim.AdamW.__init__
def init(self, params, lr=0.1, **more):
    real(self, params, lr * 1.01, **more)
torch.optim.AdamW.__init__ = init
"""


LATER = """
import torch
real = torch.optim.AdamW.step
def step(self, *args, **more):
    self.count = getattr(self, "count", 0) + 1
    for group in self.param_groups:
        group["lr"] *= 1.01 if self.count == 3 else 1
    return real(self, *args, **more)
torch.optim.AdamW.step = step
"""

KERNELS = """
import torch
torch.backends.mkldnn.enabled = False
"""

WEIGHTS = """
import os
os.environ["ATEN_CPU_CAPABILITY"] = "default"
"""


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("baseline") / "new" / "before.pt"
    assert main(["run", "--save", str(file), *FOUR_STEPS]) == 0
    return file


@pytest.mark.parametrize(
    ("plant", "arguments", "code", "finding", "says"),
    [
        (LOSS, [], 1, "step 1: the gradient of .* of its norm, from the same weights and batches", []),
        (BATCHES, [], 1, "step 1: the gradient of .* of its norm, from other batches", []),
        (OPTIMIZER, [], 1, "step 2: the last update differs from the baseline's, by .*", []),
        (LATER, [], 0, "", ["weights drift from the baseline: from the start of this step on"]),
        (KERNELS, [], 0, "", ["weights drift from the baseline: from the start of this step on"]),
        ("", ["--steps", "7"], 0, "", ["because the baseline does not have them (first: step 5)"]),
        (WEIGHTS, [], 1, "", ["because from step 1 on, the weights differ", "environment has changed"]),
    ],
)
def test_a_later_run_against_a_baseline(
    plant: str,
    arguments: list[str],
    code: int,
    finding: str,
    says: list[str],
    baseline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The plants stand for another release of torch. The audit alone does not find them. Other kernels are no fault."""
    (tmp_path / "sitecustomize.py").write_text(plant)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = tmp_path / "verdict.json"
    every = ["--every", "2"] if plant == LATER else []  # the update that differs is in a step between two audited ones
    flags = ["--against", str(baseline), "--json", str(report), *every]
    ended_with = main(["run", *flags, *FOUR_STEPS, "--clip", "0", *arguments])
    engine: dict[str, Any] = json.loads(report.read_text())["engines"][0]
    found = [f"step {each['step']}: {each['text']}" for each in engine["findings"]]
    assert ended_with == code, engine["summary"]
    assert len(found) == (1 if finding else 0)
    assert all(re.fullmatch(finding, text) for text in found)
    assert all(text in engine["summary"] for text in says)
    assert engine["summary"].count("against the baseline") <= 1
    assert "command has changed: tests/stepcheck/loop.py --steps 4 in the baseline" in engine["summary"]


SWEEP = """
import multiprocessing

import torch


def train(steps):
    torch.manual_seed(steps)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


for steps in (4, 3):
    process = multiprocessing.get_context("fork").Process(target=train, args=(steps,))
    process.start()
    process.join()
"""


def test_the_trainings_of_a_sweep_are_compared_one_by_one(tmp_path: Path):
    """Each process of the script trains one engine."""
    script, file, report = tmp_path / "sweep.py", tmp_path / "before.pt", tmp_path / "verdict.json"
    script.write_text(SWEEP)
    assert main(["run", "--save", str(file), str(script)]) == 0
    assert main(["run", "--against", str(file), "--json", str(report), str(script)]) == 0
    engines: list[dict[str, Any]] = json.loads(report.read_text())["engines"]
    assert [(each["steps"], each["not_judged"], each["notes"]) for each in engines] == [(4, {}, {}), (3, {}, {})]
