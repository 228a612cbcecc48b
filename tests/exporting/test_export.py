"""Exports real checkpoints. The scores must be equal, torch alone must read the files, and no bad file is kept."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from cifar_zero import models
from cifar_zero.checkpoints import run_folder
from cifar_zero.checkpoints.weights import encode
from cifar_zero.core.errors import RunError, UsageError
from cifar_zero.exporting import export, formats
from cifar_zero.models import LAYOUTS, Layout
from cifar_zero.models.moe import gates
from tests.support.helpers import ROOT, assert_ok, of_test_all, read_weights, run_folder_of, run_program, train_all

SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "runs.md").read_text(), re.DOTALL)

TOLERANCES = {"safetensors": 0.0, "onnx": formats.ONNX_TOLERANCE}


@pytest.fixture(scope="module")
def baseline(small_data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint. Its exports are in the same folder."""
    out = tmp_path_factory.mktemp("baseline")
    flags = ["--accelerator", "cpu", "--logger", "none", "--max_steps", "6", "--batch_size", "16"]
    train_all({out: [*flags, *small_data]})
    done = run_program("export", str(run_folder_of(out)), "--to", "onnx")
    assert_ok(done)
    assert re.search(r"last\.onnx: net, 62,006 parameters, 0\.\d\d MB", done.stdout)
    checkpoint = run_folder.newest_checkpoint(out)
    formats.export(checkpoint, checkpoint.with_suffix(".safetensors"), "safetensors")
    return checkpoint


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(7, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1


@torch.inference_mode()
def scores_of(checkpoint: Path, images: Tensor) -> Tensor:
    """Returns the scores of the model that cifar-zero evaluate tests."""
    net = models.build("net", 10).eval()
    net.load_state_dict(read_weights(net, checkpoint))
    return net(images.contiguous(memory_format=torch.channels_last))  # like a Classifier, for the same last bits


@pytest.mark.parametrize("to", TOLERANCES)
def test_an_export_has_the_scores_of_the_checkpoint(to: str, baseline: Path, images: Tensor):
    expected = scores_of(baseline, images)
    found = formats.load(str(baseline.with_suffix(f".{to}"))).scores(images)
    torch.testing.assert_close(found, expected, rtol=TOLERANCES[to], atol=TOLERANCES[to])
    assert torch.equal(found.argmax(1), expected.argmax(1))


def test_a_user_reads_the_exports_with_only_torch(baseline: Path, images: Tensor, tmp_path: Path):
    np.save(tmp_path / "images.npy", images.numpy())
    code = "import sys, numpy, torch\nimages = torch.from_numpy(numpy.load(sys.argv[1]))\nfound = []\n"
    for snippet in SNIPPETS:
        code += snippet + "\nif 'net' in dir(): found.append(net(images).tolist()); del net\n"
    code += "assert not {'lightning', 'deepspeed'} & set(sys.modules)\nprint(found)"
    done = run_program("-c", code, str(tmp_path / "images.npy"), cwd=baseline.parent, fresh=True)
    assert_ok(done)
    assert len(SNIPPETS) == 2
    (scores,) = json.loads(done.stdout)
    # With another number of threads, the process rounds differently.
    torch.testing.assert_close(torch.tensor(scores), scores_of(baseline, images), rtol=1e-5, atol=1e-6)


def test_metadata(baseline: Path):
    with safe_open(baseline.with_suffix(".safetensors"), "pt") as file:
        metadata = file.metadata()
    session = onnxruntime.InferenceSession(baseline.with_suffix(".onnx"))
    assert session.get_modelmeta().custom_metadata_map == metadata
    assert json.loads(metadata.pop("classes")) == [f"class {label}" for label in range(10)]
    assert metadata == {
        **{"format": "pt", "model": "net", "options": "{}", "image_size": "32"},
        **{"mean": "0.5", "std": "0.5", "dtype": "float32"},
        **{"checkpoint": "last.ckpt", "step": "6"},
    }
    assert str(ROOT).encode() not in baseline.with_suffix(".onnx").read_bytes()


def checkpoint_of(net: nn.Module, name: str, options: dict[str, Any], classes: list[str], folder: Path) -> Path:
    """Writes a checkpoint that has only what an export needs, and returns its path."""
    state = {f"net.{key}": value for key, value in net.state_dict().items()}
    config = {"model": {"name": name, "options": options}, "data": {"root": str(folder)}}
    record = {"config": config, "classes": classes}
    torch.save({"state_dict": state, "global_step": 1, "cifar_zero": record}, folder / "net.ckpt")
    return folder / "net.ckpt"


RESIDUAL = {"num_experts": [2, 4], "mlp_type": "residual", "ep_size": 2, "eval_capacity_factor": 0.5}
TRANSFORMER = {"num_experts": [4], "top_k": 2, "noisy_gate_policy": "Jitter"}


@pytest.mark.parametrize(
    ("name", "options"), [("net_moe", RESIDUAL), pytest.param("vit_moe", TRANSFORMER, marks=of_test_all)]
)
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # of torch 2.11 itself
@pytest.mark.filterwarnings("error")  # torch warns if it has to try another way of exporting
@torch.inference_mode()
def test_mixtures_of_experts(name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An export does not depend on the ranks that held the experts in training."""
    monkeypatch.setitem(LAYOUTS, "tiny", Layout(width=32, depth=4, heads=2))  # ONNX takes 10 seconds for the real one
    torch.manual_seed(3)
    images = F.interpolate(torch.rand(20, 3, 2, 2) * 2 - 1, (32, 32))  # different enough for several experts
    images = images.contiguous(memory_format=torch.channels_last)  # like a Classifier
    net = models.build(name, 10, **options).eval()
    for weight in (parameter for parameter in net.parameters() if parameter.dim() > 1):
        weight.mul_(3)  # otherwise the biases dominate, and one expert gets all images
    checkpoint = checkpoint_of(net, name, options, [str(label) for label in range(10)], tmp_path)
    expected = net(images)
    for routing in (gate.routing for gate in gates(net)):
        assert routing is not None
        assert (routing.tokens > 0).sum() > 1
        assert (routing.experts < 0).any() == ("eval_capacity_factor" in options)
    for to, tolerance in TOLERANCES.items():
        output = tmp_path / f"net.{to}"
        formats.export(checkpoint, output, to)
        scores = formats.load(str(output)).scores
        for found, wanted in ((scores(images), expected), (scores(images[:1]), net(images[:1]))):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_an_export_with_other_scores_is_not_kept(baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    output = tmp_path / "net.safetensors"
    output.write_text("the one before")

    def wrong(weights: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
        return encode({**weights, "fc3.bias": weights["fc3.bias"] + 1e-6}, metadata)

    monkeypatch.setattr(formats, "encode", wrong)
    with pytest.raises(RunError, match="does not reproduce the checkpoint: scores differ by up to"):
        formats.export(baseline, output, "safetensors")
    assert output.read_text() == "the one before"
    assert [file.name for file in tmp_path.iterdir()] == ["net.safetensors"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--to onnx --output net.pt", "must end in .onnx"),
        ("--to onnx --output nowhere/net.onnx", "nowhere/net.onnx cannot be written"),
        ("--to safetensors", "is the checkpoint itself"),
    ],
)
def test_mistakes(flags: str, message: str, baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    named = tmp_path / "net.safetensors"
    named.write_bytes(baseline.read_bytes())
    monkeypatch.setattr(sys, "argv", ["export", str(named), *flags.split()])
    with pytest.raises(UsageError, match=re.escape(message)):
        export.main()
    assert named.read_bytes() == baseline.read_bytes()
