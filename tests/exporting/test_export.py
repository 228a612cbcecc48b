"""Exports checkpoints. The scores must be equal, torch alone must read the files, and no bad file is kept."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cifar_zero.checkpoints.weights import encode
from cifar_zero.core.errors import RunError
from cifar_zero.exporting import export, formats
from cifar_zero.models import LAYOUTS, Layout
from cifar_zero.models.moe import gates
from tests.exporting.made_up import CLASSES, write_checkpoint
from tests.support.helpers import ROOT, assert_ok, of_test_all, run_program

SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "runs.md").read_text(), re.DOTALL)

TOLERANCES = {"safetensors": 0.0, "onnx": formats.ONNX_TOLERANCE}


def test_a_user_reads_the_exports_with_only_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    net, images = write_checkpoint(tmp_path / "last.ckpt"), torch.rand(7, 3, 32, 32) * 2 - 1
    np.save(tmp_path / "images.npy", images.numpy())
    for to in TOLERANCES:
        monkeypatch.setattr(sys, "argv", ["export", str(tmp_path / "last.ckpt"), "--to", to])
        assert export.main() == 0
        assert re.search(rf"last\.{to}: net, 62,006 parameters, 0\.\d\d MB", capsys.readouterr().out)
    code = "import sys, torch\n" + "\n".join(SNIPPETS)
    code += "assert not {'lightning', 'deepspeed'} & set(sys.modules)\n"
    code += "scores = net(torch.from_numpy(np.load('images.npy'))).tolist()\n"
    code += "print(json.dumps([scores, about, session.get_modelmeta().custom_metadata_map]))"
    done = run_program("-c", code, cwd=tmp_path, fresh=True)
    assert_ok(done)
    scores, about, about_onnx = json.loads(done.stdout)
    # With another number of threads, the process rounds differently.
    torch.testing.assert_close(torch.tensor(scores), net(images), rtol=1e-5, atol=1e-6)
    assert about == about_onnx
    assert json.loads(about.pop("classes")) == CLASSES
    assert about == {
        **{"format": "pt", "model": "net", "options": "{}", "image_size": "32"},
        **{"mean": "0.5", "std": "0.5", "dtype": "float32"},
        **{"checkpoint": "last.ckpt", "step": "6"},
    }
    assert str(ROOT).encode() not in (tmp_path / "last.onnx").read_bytes()


RESIDUAL = {"num_experts": [2, 4], "mlp_type": "residual", "ep_size": 2, "eval_capacity_factor": 0.5}
TRANSFORMER = {"num_experts": [4], "top_k": 2, "noisy_gate_policy": "Jitter"}


@pytest.mark.parametrize(
    ("name", "options"), [("net_moe", RESIDUAL), pytest.param("vit_moe", TRANSFORMER, marks=of_test_all)]
)
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # of torch 2.11 itself
@pytest.mark.filterwarnings("error")  # torch warns if it has to try another way of exporting
@torch.inference_mode()
def test_an_export_has_the_scores_of_the_model(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """An export does not depend on the ranks that held the experts in training."""
    monkeypatch.setitem(LAYOUTS, "tiny", Layout(width=32, depth=4, heads=2))  # ONNX takes 10 seconds for the real one
    torch.manual_seed(3)
    images = F.interpolate(torch.rand(20, 3, 2, 2) * 2 - 1, (32, 32))  # different enough for several experts
    images = images.contiguous(memory_format=torch.channels_last)  # like a Classifier
    net = write_checkpoint(tmp_path / "net.ckpt", name, **options)
    expected = net(images)
    for routing in (gate.routing for gate in gates(net)):
        assert routing is not None
        assert (routing.tokens > 0).sum() > 1
        assert (routing.experts < 0).any() == ("eval_capacity_factor" in options)
    for to, tolerance in TOLERANCES.items():
        output = tmp_path / f"net.{to}"
        formats.export(tmp_path / "net.ckpt", output, to)
        scores = formats.load_classifier(str(output)).scores
        for actual, reference in ((scores(images), expected), (scores(images[:1]), net(images[:1]))):
            torch.testing.assert_close(actual, reference, rtol=tolerance, atol=tolerance)


def test_an_export_with_other_scores_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint, output = tmp_path / "last.ckpt", tmp_path / "net.safetensors"
    write_checkpoint(checkpoint)
    output.write_text("the one before")

    def wrong(weights: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
        return encode({**weights, "fc3.weight": weights["fc3.weight"] * (1 + 1e-6)}, metadata)

    monkeypatch.setattr(formats, "encode", wrong)
    with pytest.raises(RunError, match="does not reproduce the checkpoint: scores differ by up to"):
        formats.export(checkpoint, output, "safetensors")
    assert output.read_text() == "the one before"
    assert {*tmp_path.iterdir()} == {checkpoint, output}
