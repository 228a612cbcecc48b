"""The house rules that a reader relies on: every module imports, every recipe builds, data goes one way."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import build
import checks
import cli
from tests.helpers import ROOT, on_a_small_cpu

MODULES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for path in [
        *ROOT.glob("*.py"),
        *(file for folder in ROOT.iterdir() if (folder / "__init__.py").exists() for file in folder.rglob("*.py")),
    ]
)
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
WITHOUT_TORCH = ["config", "cli", "checks", "launch", "hardware", "run_folder", "models", "sources", "strategies"]
WITHOUT_TORCH += ["exporting", "export", "predict", "doctor", "diagnosis", "known_failures"]
WITHOUT_TORCH += ["launchers", "supervisor", "heartbeat", "optimizers", "schedules"]
WITHOUT_TORCH += ["plan", "planning.automatic", "planning.network", "planning.recommend", "reports.plan"]
WITHOUT_TORCH += ["compare", "comparison.agreement", "comparison.plan"]
WITHOUT_TORCH += ["sweep", "sweeping.runs", "sweeping.slots", "run_process", "options"]
WITHOUT_TORCH += ["benchmarks.deepspeed", "benchmarks.startup"]  # wrong usage is answered at once


def imports(path: Path) -> set[str]:
    """Top-level names of the packages that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports(module: str):
    importlib.import_module(module)


def test_networks_and_sources_know_no_lightning():
    for folder in ("models", "sources"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not imports(path) & {"lightning", "deepspeed", "train", "strategies"}, path


def test_nothing_imports_the_commands():
    for module in MODULES:
        if module == "compare":  # a command itself, which trains perturbed runs with train.train
            continue
        path = ROOT / (module.replace(".", "/") + ".py")
        if path.exists():
            commands = {"train", "evaluate", "export", "predict", "doctor", "plan", "compare", "sweep"}
            assert not imports(path) & commands, path


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_light_modules_stay_light(module: str):
    heavy = "{'torch', 'lightning', 'deepspeed', 'numpy', 'torchvision'}"
    code = (
        f"import sys, {module}; sys.exit(str(sorted({heavy} & set(sys.modules))) if {heavy} & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_baseline_does_not_import_deepspeed():
    code = "import sys, build, cli; build.trainer(cli.parse(['--accelerator', 'cpu']), None)"
    code += "; sys.exit('deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipes_build(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    config = cli.parse(["--config", str(recipe), "--accelerator", "cpu", *on_a_small_cpu(recipe)])
    checks.settle(config)
    assert config.data.source != "auto"  # a recipe names its source
    module, trainer = build.module(config), build.trainer(config, None)
    module.configure_model()
    assert module.net is not None
    assert trainer.max_epochs == config.epochs
