"""After an installation with pip the classes can be imported from any directory, and the commands run there."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cifar_zero.__main__ import COMMANDS
from tests.support.helpers import ROOT, assert_ok, of_test_all

PIP = [sys.executable, "-m", "pip"]
ALONE = ["--no-deps", "--no-index"]


def test_pins_are_in_the_tested_ranges_and_in_the_lock():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [each for extra in project["optional-dependencies"].values() for each in extra]
    ranges = {each.name: each.specifier for each in map(Requirement, [*project["dependencies"], *optional])}
    pins: dict[str, str] = {}
    for file in ("requirements.txt", "requirements-dev.txt"):
        lines = [line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
        for pin in map(Requirement, [line for line in lines if line and not line.startswith("-r")]):
            pins[pin.name] = str(pin.specifier).removeprefix("==")
    assert {*ranges} - {"cifar-zero"} == {*pins}
    assert [name for name, version in pins.items() if version not in ranges[name]] == []
    locked = dict(re.findall(r"^(\S+?)==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    assert {name: locked[name.lower()] for name in pins} == pins


OWN_TEST = """
from stepcheck.testing import assert_agrees
from my_module import MyModule

def test_zero_trains_what_ddp_trains():
    assert_agrees(MyModule, strategies=["deepspeed_stage_3"], devices=2, steps=4)
"""


@pytest.mark.distributed
@of_test_all
def test_a_wheel_trains_and_checks_in_an_empty_directory(tmp_path: Path):
    """The wheel is built from a clone. The environment of the wheel has the packages of the tests' environment, but
    nothing of the repository."""
    clone, env, work = tmp_path / "clone", tmp_path / "env", tmp_path / "work"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    build = [*PIP, "wheel", *ALONE, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(clone)]
    assert_ok(subprocess.run(build, capture_output=True, text=True))
    shutil.rmtree(clone)
    venv.create(env)
    (packages,) = env.glob("lib/python*/site-packages")
    (packages / "pinned.pth").write_text(sysconfig.get_path("purelib"))
    (wheel,) = tmp_path.glob("*.whl")
    install = [*PIP, "--python", str(env / "bin" / "python"), "install", *ALONE, str(wheel)]
    assert_ok(subprocess.run(install, capture_output=True, text=True))

    work.mkdir()
    shutil.copy(ROOT / "docs" / "my_module.py", work)
    (work / "test_mine.py").write_text(OWN_TEST)
    for name in ("train", "datamodule"):
        (work / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}.py')")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(program: str, *arguments: str) -> str:
        command = [str(env / "bin" / program), *arguments]
        done = subprocess.run(command, cwd=work, env=clean, capture_output=True, text=True, timeout=240)
        assert_ok(done)
        return done.stdout

    for command in COMMANDS:
        assert f"usage: ../env/bin/cifar-zero {command} " in run("cifar-zero", command, "--help")
    short = ["--accelerator", "cpu", "--data.source", "digits", "--max_steps", "4", "--devices", "2"]
    assert "deepspeed_stage_2" in run("cifar-zero", "train", *short, "--strategy", "deepspeed_stage_2")
    assert "deepspeed_stage_2: " in run("stepcheck", "accept", "--print_cases")
    assert "1 passed" in run("python", "-m", "pytest", "-q", "test_mine.py")
