"""Tests rules of the whole tree. Every module imports, and every recipe builds."""

import ast
import importlib
import re
from pathlib import Path

import networkx
import pytest

from cifar_zero.__main__ import COMMANDS
from cifar_zero.config import command_line
from cifar_zero.config.run import run_of_bytes
from cifar_zero.planning.formulas import network_of
from cifar_zero.training import build
from cifar_zero.training.resolve import resolve
from tests.support.helpers import ROOT, assert_ok, on_a_small_cpu, run_program


def _module_name(file: Path) -> str:
    return file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


PACKAGE = ROOT / "cifar_zero"
PACKAGES = ("cifar_zero", "stepcheck", "benchmarks")
MODULES = sorted(
    _module_name(path)
    for folder, pattern in ((ROOT, "*.py"), *((ROOT / name, "**/*.py") for name in PACKAGES))
    for path in folder.glob(pattern)
    if "upstream" not in path.parts  # scripts that train
)
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
WITHOUT_TORCH = [*COMMANDS.values(), "benchmarks.speed"]  # wrong usage is answered at once
WITHOUT_TORCH += [f"cifar_zero.{name}" for name in ("core", "config", "launch", "models", "data", "strategies")]
WITHOUT_TORCH += ["cifar_zero.config.rules", "cifar_zero.checkpoints.run_folder", "cifar_zero.planning.formulas"]

OF_DEEPSPEED = (
    "ds_tensor",
    "ds_id",
    "ds_shape",
    "ds_numel",
    "fp32_partitioned_groups_flat",
    "deepspeed_engine",
    "_hp_grad",
    "safe_get_full_\\w+",
    "GatheredParameters",
    "loss_scale_config",
    "persistent_parameters",
    "group_name",
    "_get_expert_parallel_group",
    "get_global_grad_norm",
)
"""Names in an engine, a ZeRO optimizer or a sharded parameter."""


@pytest.mark.parametrize("module", MODULES)
def test_imports(module: str):
    importlib.import_module(module)


@pytest.mark.parametrize(
    ("folder", "packages"),
    [("models", "lightning|deepspeed"), ("data", "lightning|deepspeed"), (".", "cifar_module|datamodule|train")],
)
def test_a_folder_does_not_import_what_is_above_it(folder: str, packages: str):
    for path in (PACKAGE / folder).rglob("*.py"):
        assert not re.search(rf"^\s*(from|import) ({packages})\b", path.read_text(), re.MULTILINE), path


def imports_of(package: str) -> networkx.DiGraph:
    """Returns the imports between the modules of a package, also those inside of functions, by `import_module`, and of
    objects that a string names as MODULE:NAME."""
    files = {_module_name(file): file for file in (ROOT / package).rglob("*.py") if "upstream" not in file.parts}
    graph = networkx.DiGraph()
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                imported = [each if each in files else node.module for each in full]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                imported = [node.value.split(":")[0]]
            graph.add_edges_from((name, each) for each in imported if each in files and each not in (name, package))
    return graph


def by_folder(imports: networkx.DiGraph, package: str) -> networkx.DiGraph:
    """Returns the imports between the folders of a package and the files that are directly in it."""
    folders = networkx.DiGraph()
    for edge in imports.edges:
        ends = [name.split(".")[1] for name in edge if name != package]
        if len({*ends}) == 2:
            folders.add_edge(*ends)
    return folders


@pytest.mark.parametrize("package", ["cifar_zero", "stepcheck"])
def test_imports_have_no_circle_and_are_as_drawn(package: str):
    """CONTRIBUTING.md draws them without the arrows that follow from two others."""
    modules = imports_of(package)
    folders = by_folder(modules, package)
    for graph in (modules, folders):
        assert networkx.is_directed_acyclic_graph(graph), networkx.find_cycle(graph)
    arrows = sorted(networkx.transitive_reduction(folders).edges)
    drawn = "\n".join(["flowchart TD", *(f"    {name} --> {other}" for name, other in arrows)])
    assert drawn in (ROOT / "CONTRIBUTING.md").read_text(), f"the picture of today:\n{drawn}"


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
    flags += ["--devices", "1", "--bench_steps", "1", "--warmup_steps", "1", "--out", str(tmp_path)]
    code = f"import sys; sys.argv += {flags}; from cifar_zero.train import main; assert main() == 0\n"
    code += "assert 'deepspeed.runtime.zero.muon.original_muon' in sys.modules\n"
    code += "assert 'torch._inductor.compile_fx' not in sys.modules"
    assert_ok(run_program("-c", code))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_builds_and_its_printed_configuration_is_the_same_run(recipe: Path, tmp_path: Path):
    config = command_line.parse(["--config", str(recipe), "--accelerator", "cpu", *on_a_small_cpu(recipe)])
    assert config.data.source != "auto"  # a recipe names its source
    again = tmp_path / "again.yaml"
    again.write_text(command_line.dump(config))
    assert command_line.parse(["--config", str(again)]) == config
    run = resolve(config)
    assert run_of_bytes(run.to_bytes()) == run
    assert network_of(run).trained
    assert build.trainer(run, None).max_epochs == config.recipe.epochs
