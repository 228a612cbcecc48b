"""Mistakes that a look at the files shows are found before torch, Lightning or DeepSpeed is imported."""

import json
import shlex
from pathlib import Path

from tests.support.helpers import ROOT, assert_ok, run_program

FILES = {
    "typo.json": '{"zero_optimisation": {"stage": 2}}',
    "last.ckpt": "",
    "cat.png": "",
    **{
        f"{library}.py": f"raise SystemExit('{library} was imported')"
        for library in ("torch", "lightning", "deepspeed")
    },
}

MESSAGES = {
    "compare --strategies baseline typo.json": "did you mean zero_optimization?",
    "train --ds_config typo.json": "did you mean zero_optimization?",
    "train --weights nowhere": "nowhere does not exist",
    "train --model torchvision:resnet18 --batch_size 6 --devices 4": "error: --batch_size 6",
    "evaluate last.ckpt --delta nowhere": "--delta nowhere does not exist",
    "export last.ckpt --to safetensors --delta nowhere": "--delta nowhere does not exist",
    "predict last.ckpt nowhere.png": "nowhere.png does not exist",
    "predict nowhere.ckpt cat.png": "nowhere.ckpt does not exist",
}

PROGRAM = """
import contextlib, importlib, io, json, sys
from cifar_zero.__main__ import COMMANDS
from cifar_zero.core import exits
results = []
for words in json.loads(sys.argv[1]):
    sys.argv = words
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = exits.guarded(lambda: importlib.import_module(COMMANDS[words[0]]).main())
    results.append((code, errors.getvalue()))
print(json.dumps(results))
"""


def test_they_are_found_before_the_libraries_are_imported(tmp_path: Path):
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    commands = json.dumps([shlex.split(line) for line in MESSAGES])
    done = run_program("-c", PROGRAM, commands, cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, fresh=True)
    assert_ok(done)
    for (line, message), (code, said) in zip(MESSAGES.items(), json.loads(done.stdout), strict=True):
        assert (code, said.count("\n"), message in said) == (2, 1, True), f"{line}: {said}"
    assert not (tmp_path / "comparisons").exists()
