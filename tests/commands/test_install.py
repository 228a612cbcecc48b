"""After an installation with pip, the classes and the package can be imported from any directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT, assert_ok

IMPORTS = """
import site, sys
site.addsitedir(sys.argv[1])
import cifar_module, datamodule, train, cifar_zero.comparison.compare
print(*(module.__file__ for module in (cifar_module, datamodule, train, cifar_zero.comparison.compare)), sep="\\n")
"""


@pytest.mark.slow
def test_an_editable_installation_is_importable_from_any_directory(tmp_path: Path):
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [*pip, "--prefix", str(tmp_path), "--editable", str(ROOT)]
    assert_ok(subprocess.run(command, capture_output=True, text=True))
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    command = [sys.executable, "-c", IMPORTS, str(packages)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert_ok(done)
    files = ("cifar_module.py", "datamodule.py", "train.py", "cifar_zero/comparison/compare.py")
    assert done.stdout.split() == [str(ROOT / file) for file in files]
