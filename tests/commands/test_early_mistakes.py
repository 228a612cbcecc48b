"""Mistakes that a look at the files shows are found before torch, Lightning or DeepSpeed is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.helpers import ROOT, run_program

OWN = ROOT / "tests" / "users_code" / "own_code.py"
FILES = {
    "typo.json": '{"zero_optimisation": {"stage": 2}}',
    "old.py": "import torch",
    "last.ckpt": "",
    "cat.png": "",
}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("compare --module own.py:X --devices 2", "--module is now: stepcheck module FILE.py:MODULE"),
        ("compare --strategies baseline typo.json", "did you mean zero_optimization?"),
        ("train --ds_config typo.json", "did you mean zero_optimization?"),
        ("train --weights nowhere", "nowhere does not exist"),
        ("evaluate last.ckpt --delta nowhere", "--delta nowhere does not exist"),
        ("export last.ckpt --to safetensors --delta nowhere", "--delta nowhere does not exist"),
        ("predict last.ckpt nowhere.png", "nowhere.png does not exist"),
        ("predict nowhere.ckpt cat.png", "nowhere.ckpt does not exist"),
    ],
)
def test_it_is_found_before_the_libraries_are_imported(command: str, message: str, tmp_path: Path):
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    for library in ("torch", "lightning", "deepspeed"):
        (tmp_path / f"{library}.py").write_text(f"raise SystemExit('{library} was imported')")
    done = run_program(*command.split(), cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, fresh=True)
    assert message in done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert not (tmp_path / "comparisons").exists()
