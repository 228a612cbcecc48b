"""Every command of the README runs as written, on small data; every link points to an existing file."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from cifar_zero.config import command_line
from tests.support.helpers import ROOT, WHOLE, assert_ok, run_program, train_in_ranks

TEXT = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\.venv/bin/(.+)$", TEXT, re.MULTILINE)
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def in_folder(command: str, folder: Path) -> str:
    """Returns a command of a document that reads and writes in `folder` instead of runs/."""
    drawn = command.replace("--plot_schedule", f"--plot_schedule {folder}/schedule.png")
    return drawn.replace("runs/", f"{folder}/")


def test_the_core_has_the_lines_that_are_promised():
    rows = re.findall(r"^\| (\[.*\)) \|.*\| (\d+) \|$", TEXT[TEXT.index("## Reading the code") :], re.MULTILINE)
    assert len(rows) == 6
    for files, promised in rows:
        lines = sum(len((ROOT / file).read_text().splitlines()) for file in re.findall(r"\]\((.*?)\)", files))
        assert lines == pytest.approx(int(promised), rel=0.1), files


@pytest.mark.distributed
@pytest.mark.slow
def test_commands(small_data: list[str], tmp_path: Path):
    """Trainings take a few steps; those with the same number of ranks share their processes, one after the other."""
    small = ["--accelerator", "cpu", "--epochs", "1", "--max_steps", "4", "--batch_size", "16", "--out", str(tmp_path)]
    trainings: dict[int, list[list[str]]] = {1: [], 2: []}
    others: list[list[str]] = []
    for command in COMMANDS:
        program, *arguments = shlex.split(in_folder(command, tmp_path))
        if program == "python" and arguments[0] == "train.py" and not {"--help", "--print_config"} & {*arguments}:
            flags = [*arguments[1:], *small_data, *small]
            if "--plot_schedule" in arguments:
                others.append(["train.py", *flags])
                continue
            ranks = command_line.parse(flags).devices
            trainings[1 if ranks == "auto" else ranks].append(flags)
        elif program == "python" and arguments[0] == "compare.py":
            others.append([*arguments, *small_data, *small])
        elif program == "python" and arguments[0] == "sweep.py":  # a validation is at the end of an epoch
            out = str(tmp_path / "sweeps")
            others.append([*arguments, *small_data, *small[:4], "--batch_size", "16", "--out", out])
        elif program == "python":
            others.append(arguments)
    assert sum(map(len, trainings.values())) >= 5
    programs = {"evaluate.py", "export.py", "predict.py", "plan.py", "compare.py", "sweep.py"}
    assert programs <= {arguments[0] for arguments in others}
    for ranks, flags in trainings.items():
        train_in_ranks(flags, ranks)
    for arguments in others:
        if arguments[0] not in ("compare.py", "sweep.py") or WHOLE:  # half a minute each; others are run elsewhere
            assert_ok(run_program(*arguments))


@pytest.mark.distributed
@pytest.mark.timeout(3600)
@pytest.mark.skipif("RECIPES" not in os.environ, reason="some minutes, of make recipes")
def test_commands_of_the_course(tmp_path: Path):
    """Commands run in order, because later ones name the runs of earlier ones; trainings take a few steps."""
    commands = re.findall(r"^\.venv/bin/python (.+)$", (ROOT / "docs" / "course.md").read_text(), re.MULTILINE)
    small = ["--max_steps", "4", "--trainer.limit_test_batches", "2", "--out", str(tmp_path), "--accelerator", "cpu"]
    assert len(commands) > 40
    for command in commands:
        arguments = shlex.split(in_folder(command, tmp_path))
        trains = arguments[0] in ("train.py", "compare.py") and "--check_gradients" not in arguments
        done = run_program(*arguments, *(small if trains else []), timeout=600)
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"


def test_tensorboard_command_serves_a_page(tmp_path: Path):
    (command,) = [command for command in COMMANDS if command.startswith("tensorboard")]
    arguments = [str(tmp_path) if word == "runs" else word for word in shlex.split(command)[1:]]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    program = [sys.executable, "-m", "tensorboard.main", *arguments, "--port", port]
    server = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        page = _get(f"http://localhost:{port}/", seconds=60)
    finally:
        server.terminate()
        server.wait(timeout=30)
    assert "TensorBoard" in page


def _get(address: str, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urlopen(address, timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_point_to_existing_files(document: Path):
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    for link in links:
        if not link.startswith("http"):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^make (\w+)", TEXT, re.MULTILINE))
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert targets
    assert targets <= {line.split()[0] for line in listed.splitlines()}


def test_make_fuzz_enables_every_test():
    """`make fuzz` sets each environment variable that enables a test."""
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    wanted = set(re.findall(r'"([A-Z]+)" (?:not )?in os\.environ', tests)) - {"RANK"}  # a rank asks for that
    command = subprocess.run(["make", "--dry-run", "fuzz"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert wanted >= {"FUZZ", "RECIPES"}
    assert all(f"{name}=1 " in command for name in wanted)
