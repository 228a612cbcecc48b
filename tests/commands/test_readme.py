"""The commands of the first pages run as written, on small data. Flags and links of all pages exist."""

import importlib
import json
import re
import runpy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import pyplot
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from cifar_zero.__main__ import COMMANDS as PROGRAMS
from cifar_zero.config import command_line
from cifar_zero.core.errors import UsageError
from tests.support.helpers import ROOT, WHOLE, assert_ok, of_test_all, run_program, train_all

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(document: Path, language: str = r"\w*") -> list[str]:
    """Returns the code blocks of a document that are in one language, or in any language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


FIRST_PAGES = ("README.md", *(["docs/train.md"] if WHOLE else []))
COMMANDS = [
    command
    for page in FIRST_PAGES
    for block in blocks(ROOT / page, "bash")
    for command in re.findall(r"^\.venv/bin/(.+)$", block, re.MULTILINE)
]


def in_folder(command: str, folder: Path) -> str:
    """Returns a command of a document that reads and writes in `folder` instead of runs/."""
    return command.replace("runs/", f"{folder}/")


STARTS = r"(?:python|torchrun|deepspeed) (?:.*? )?(?=train\.py)|(?:\S+ .*?-m )?cifar.zero "
LAUNCHED = rf"^(?:\.venv/bin/)?(?:{STARTS})(\w+)(?:\.py)? (.*)$"
"""A pattern for a line of a page that starts a command, also as `-m cifar_zero`. Its groups are the command's name and
arguments."""


def test_flags_in_all_pages_exist():
    """The parser of train accepts the commands of train. Flags of the other commands are in their help, or are flags of
    train."""
    flags_of = {name: run_program(name, "--help").stdout for name in PROGRAMS}
    flags_of["train"] = run_program("train", "--help", "all").stdout
    wrong, checked = [], 0
    for page in DOCUMENTS:
        text = "\n".join(blocks(page)).replace("\\\n", " ")
        for name, rest in re.findall(LAUNCHED, text, re.MULTILINE):
            if name not in PROGRAMS or "..." in rest or "--help" in rest:
                continue
            checked += 1
            arguments = shlex.split(rest, comments=True)
            try:
                if name == "train" and "my_" not in rest:
                    command_line.parse(arguments)
                    continue
            except UsageError as error:
                wrong.append(f"{page.name}: {name} {rest}: {error}")
            except SystemExit:  # --print_config
                continue
            flags = [word.split("=")[0] for word in arguments if re.match(r"--(?!module\.|model\.)", word)]
            known = flags_of[name] + flags_of["train"]
            wrong += [f"{page.name}: {name} {rest}: {flag}" for flag in flags if flag not in known]
    assert not wrong, "\n".join(wrong)
    assert checked > 80


@pytest.mark.distributed
@pytest.mark.slow
def test_commands(small_data: list[str], tmp_path: Path):
    """Trainings take a few steps."""
    small = ["--accelerator", "cpu", "--epochs", "1", "--max_steps", "4", "--batch_size", "4", "--out", str(tmp_path)]
    trainings: list[list[str]] = []
    others: list[list[str]] = []
    stepchecks: list[list[str]] = []
    for command in COMMANDS:
        program, *arguments = shlex.split(in_folder(command, tmp_path))
        if program == "python" and not {"--help", "--print_config"} & {*arguments}:
            trainings.append([*arguments[1:], *small_data, *small])
        elif program == "stepcheck":
            stepchecks.append(["-m", "stepcheck", *arguments])
        elif program == "cifar-zero" and arguments[0] == "compare":
            others.append([*arguments, *small_data, *small])
        elif program in ("python", "cifar-zero") and arguments != ["doctor"]:  # half a minute: tests/diagnosis runs it
            others.append(arguments)
    assert len(trainings) >= 5
    programs = {"evaluate", "export", "predict", "plan", "compare"}
    assert programs <= {arguments[0] for arguments in others}
    for flags in trainings:
        train_all({tmp_path: flags})
    if not WHOLE:  # half a minute each; other tests run the other commands
        stepchecks, others = [], [arguments for arguments in others if arguments[0] != "compare"]
    for arguments in (*others, *stepchecks):
        assert_ok(run_program(*arguments))


@pytest.mark.distributed
@pytest.mark.slow
def test_make_train_ends_with_the_agreement_of_both_runs(
    small_data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Trainings take four steps on two ranks. The comparison finds the newest run of each name. It imports DeepSpeed to
    read a checkpoint, and prints none of its lines."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    shown = subprocess.run(["make", "-n", "train"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    trainings = [shlex.split(line)[2:] for line in shown.splitlines() if " train.py " in line]
    few = [*small_data, "--accelerator", "cpu", "--devices", "2", "--max_steps", "4"]
    for flags in trainings:
        train_all({tmp_path: [*flags, *few]})
    folders = [str(tmp_path / flags[flags.index("--name") + 1]) for flags in trainings]
    done = run_program("compare", "--runs", *folders, "--out", str(tmp_path / "comparisons"))
    assert_ok(done)
    assert "1 of 1 agree with baseline" in done.stdout
    assert "Setting" not in done.stdout + done.stderr


@pytest.mark.distributed
@pytest.mark.timeout(3600)
@of_test_all
def test_commands_of_the_course(tmp_path: Path):
    """Commands run in order, because later commands name the runs of earlier commands. Trainings take a few steps."""
    text = "\n".join(lab.read_text() for lab in sorted((ROOT / "docs" / "course").glob("[1-4]-*.md")))
    commands = re.findall(r"^\.venv/bin/(?:python|cifar-zero) (?!docs/)(.+)$", text, re.MULTILINE)
    small = ["--max_steps", "4", "--trainer.limit_test_batches", "2", "--out", str(tmp_path), "--accelerator", "cpu"]
    assert len(commands) > 35
    for command in commands:
        arguments = shlex.split(in_folder(command, tmp_path))
        done = run_program(*arguments, *(small if arguments[0] in ("train.py", "compare") else []))
        assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"


def test_code_of_the_course():
    """The course's checkpointing gives the gradients of the plain block. The course's LoRA layer begins with the output
    of the linear layer."""
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    for block in blocks(ROOT / "docs" / "course" / "3-metrics-memory-lora.md", "python"):
        exec(block, names)
    layers, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(3, 4, requires_grad=True)
    leaves = [x, *layers.parameters()]
    want = torch.autograd.grad(layers(x).square().sum(), leaves)
    names["Checkpoint"].apply(layers, x).square().sum().backward()
    for leaf, gradient in zip(leaves, want, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, gradient)
    adapted = names["LoRA"](layers[0], rank=2)
    assert torch.equal(adapted(x), layers[0](x))
    assert [name for name, parameter in adapted.named_parameters() if parameter.requires_grad] == ["a", "b"]


SCRIPTS = re.findall(
    r"^```python\n(.*?)^```\n\n```\n(.*?)^```", (ROOT / "docs" / "migrate.md").read_text(), re.MULTILINE | re.DOTALL
)
"""The Python scripts of docs/migrate.md, and the last lines that each prints."""


@pytest.mark.distributed
@of_test_all
def test_scripts_of_the_guide_print_what_it_shows(tmp_path: Path):
    """Lightning's own launcher starts them on two ranks."""
    assert len(SCRIPTS) == 2
    for block, shown in SCRIPTS:
        (tmp_path / "script.py").write_text(block)
        done = run_program("script.py", cwd=tmp_path)
        assert_ok(done)
        numbers = r"\d+\.\d+"  # which depend on the processor
        assert re.sub(numbers, "N", shown.strip()) in re.sub(numbers, "N", done.stdout)


@of_test_all
def test_the_figures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The last figure needs a training."""
    figures = importlib.import_module("docs.figures")
    for draw in figures.FIGURES[:-1]:
        draw()
        pyplot.savefig(tmp_path / f"{draw.__name__}.png")
        pyplot.close()
    assert all(figures.file_of(draw).exists() for draw in figures.FIGURES)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "docs" / "augmentation.py"))
    assert (tmp_path / "augmentation.png").stat().st_size > 100_000


@pytest.mark.usefixtures("signal_handlers")
def test_the_search_continues_its_study(
    small_data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("optuna", reason="pip install optuna")
    monkeypatch.chdir(tmp_path)
    flags = [*small_data, "--batch_size", "64", "--epochs", "1", "--logger", "none", "--accelerator", "cpu"]
    monkeypatch.setattr("sys.argv", ["sweep.py", "1", *flags])
    for _ in range(2):
        runpy.run_path(str(ROOT / "docs" / "sweep.py"))
    trials = [json.loads((tmp_path / f"runs/trial_{number}/version_0/metrics.json").read_text()) for number in (0, 1)]
    best = max(trial["val/acc"] for trial in trials)
    assert f"val/acc {best:.2%}" in capsys.readouterr().out.splitlines()[-1]


def test_the_first_cell_of_the_notebook_finds_the_program_from_its_folder():
    book = json.loads((ROOT / "docs" / "course" / "tour.ipynb").read_text())
    first = next("".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code")
    code = f"{first}\nprint(Path.cwd(), bool(importlib.util.find_spec('cifar_module')))"
    done = run_program("-c", code, cwd=ROOT / "docs" / "course", env={"PYTHONPATH": ""}, fresh=True)
    assert done.stdout == f"{ROOT} True\n", done.stderr


@pytest.mark.distributed
@of_test_all
def test_cells_of_the_notebook(tmp_path: Path):
    """The cells run in order, as one script that Lightning takes for a notebook. The script prints three times that two
    trainings agree."""
    book = json.loads((ROOT / "docs" / "course" / "tour.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    start = "import subprocess, sys; subprocess.run([sys.executable, *{}], check=True)"
    for number, cell in enumerate(cells):
        if cell.startswith("!{sys.executable}"):
            cells[number] = start.format(shlex.split(cell.replace("\\\n", ""))[1:])
    (tmp_path / "script.py").write_text("\n".join(["import sys", "sys.ps1 = '>>> '", *cells]))
    done = run_program("script.py", cwd=tmp_path)
    assert_ok(done)
    assert done.stdout.count("the same losses, bit for bit: True") == 2
    assert "2 of 2 agree with baseline: 2 bit-identical" in done.stdout


def test_tensorboard_command_reads_a_run(tmp_path: Path):
    """With --inspect, TensorBoard prints what it has read, instead of serving it."""
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("train/loss", 2.3, 10)
    (command,) = [command for command in COMMANDS if command.startswith("tensorboard")]
    arguments = [str(tmp_path) if word == "runs" else word for word in shlex.split(command)[1:]]
    done = run_program("-m", "tensorboard.main", *arguments, "--inspect")
    assert_ok(done)
    assert "train/loss" in done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_point_to_existing_files(document: Path):
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    for link in links:
        if not link.startswith(("http", "../../actions")):  # the latter is GitHub's
            assert (document.parent / link).exists(), f"{document.name}: {link}"
