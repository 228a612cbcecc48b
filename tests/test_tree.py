"""Tests rules of the whole tree. Every module imports, every recipe builds, and imports between packages go one way."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from cifar_module import CIFARModule
from cifar_zero.__main__ import COMMANDS
from cifar_zero.config import command_line
from cifar_zero.training import build
from cifar_zero.training.resolve import resolve
from tests.support.helpers import ROOT, assert_ok, on_a_small_cpu, run_program

PACKAGE = ROOT / "cifar_zero"
MODULES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for path in [*ROOT.glob("*.py"), *PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
)
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
WITHOUT_TORCH = [*COMMANDS.values(), "benchmarks.speed"]  # wrong usage is answered at once
WITHOUT_TORCH += [f"cifar_zero.{name}" for name in ("core", "config", "launch", "models", "data", "strategies")]
WITHOUT_TORCH += ["cifar_zero.config.rules", "cifar_zero.checkpoints.run_folder", "cifar_zero.planning.formulas"]

FLOORS = (
    ("core",),
    ("models", "optimizers", "schedules"),
    ("config",),
    ("build_model", "data", "launch"),
    ("checkpoints",),
    ("strategies",),
    ("step_check",),
    ("training",),
    ("planning",),
    ("train",),
    ("comparison", "diagnosis", "sweeping", "exporting"),
)
"""The packages of cifar_zero, and its modules build_model and train. Each imports only from the floors before its own
floor."""

OF_DEEPSPEED = (
    "ds_tensor",
    "ds_id",
    "ds_shape",
    "ds_numel",
    "fp32_partitioned_groups_flat",
    "deepspeed_engine",
    "_hp_grad",
)
OF_DEEPSPEED += ("safe_get_full_\\w+", "GatheredParameters", "loss_scale_config")
OF_DEEPSPEED += ("persistent_parameters", "group_name", "_get_expert_parallel_group", "get_global_grad_norm")
"""Names in an engine, a ZeRO optimizer or a sharded parameter."""


def imports(path: Path) -> set[str]:
    """Returns the top-level names of the packages that a file imports."""
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


def test_models_and_data_know_no_lightning():
    for folder in ("models", "data"):
        for path in (PACKAGE / folder).rglob("*.py"):
            assert not imports(path) & {"lightning", "deepspeed"}, path


def test_imports_go_one_way():
    """A package imports only from floors before its own floor. It imports no other package of its floor, and no root
    file."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    assert set(floor) == {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {"build_model", "train"}
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            modules = [node.module] if node.module != "cifar_zero" else [f"cifar_zero.{n.name}" for n in node.names]
            for module in modules:
                first, _, rest = module.partition(".")
                other = rest.split(".")[0]
                # __main__.py is above all floors
                lower = first != "cifar_zero" or other == own or floor[other] < floor.get(own, len(FLOORS))
                if not lower or first in ("cifar_module", "datamodule", "train"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_only_one_folder_knows_the_attributes_of_deepspeed():
    """Everything else calls strategies/hooks.py."""
    known = re.compile(rf"\b({'|'.join(OF_DEEPSPEED)})\b")
    for path in sorted({*PACKAGE.rglob("*.py"), *ROOT.glob("*.py")} - {*PACKAGE.glob("strategies/deepspeed/*.py")}):
        assert not known.findall(path.read_text()), path


def test_light_modules_stay_light():
    done = run_program("-X", "importtime", "-c", f"import {', '.join(WITHOUT_TORCH)}")
    assert_ok(done)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "jsonargparse" in imported
    assert not imported & {"torch", "lightning", "deepspeed", "numpy", "torchvision"}


def test_the_baseline_does_not_import_deepspeed():
    code = "import sys; from cifar_zero.training import build; from cifar_zero.config import command_line\n"
    code += "from cifar_zero.training.resolve import resolve\n"
    code += "build.trainer(resolve(command_line.parse(['--accelerator', 'cpu'])), None)"
    code += "; sys.exit('deepspeed' in sys.modules)"
    assert_ok(run_program("-c", code))


def test_the_first_step_of_zero_2_does_not_load_the_compiler(small_data: list[str], tmp_path: Path):
    flags = [*small_data, "--strategy", "deepspeed_stage_2", "--accelerator", "cpu", "--batch_size", "8"]
    flags += ["--bench_steps", "1", "--warmup_steps", "1", "--out", str(tmp_path)]
    code = f"import sys; sys.argv += {flags}; from cifar_zero.train import main; assert main() == 0\n"
    code += "assert 'deepspeed.runtime.zero.muon.original_muon' in sys.modules\n"
    code += "assert 'torch._inductor.compile_fx' not in sys.modules"
    assert_ok(run_program("-c", code))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipes_build(recipe: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    config = command_line.parse(["--config", str(recipe), "--accelerator", "cpu", *on_a_small_cpu(recipe)])
    run = resolve(config)
    assert config.data.source != "auto"  # a recipe names its source
    module, trainer = CIFARModule(run, run.num_classes), build.trainer(run, None)
    module.configure_model()
    assert module.net is not None
    assert trainer.max_epochs == config.recipe.epochs
