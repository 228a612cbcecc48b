"""Exports of real checkpoints: bit-identical scores, readable with torch alone, and no bad file is kept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
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
from tests.support.helpers import ROOT, WHOLE, assert_ok, read_weights, run_folder_of, run_program, train_all

SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)


TOLERANCES = {"safetensors": 0.0, "onnx": formats.ONNX_TOLERANCE}

FLAGS = ["--accelerator", "cpu", "--logger", "none", "--max_steps", "6", "--batch_size", "16"]


@pytest.fixture(scope="module")
def baseline(small_data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("baseline")
    train_all({out: [*FLAGS, *small_data]})
    return run_folder.newest_checkpoint(out)


@pytest.fixture(scope="module")
def sharded(small_data: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("sharded")
    runs = {strategy: out / strategy for strategy in ("deepspeed_stage_2", "deepspeed_stage_3")}
    train_all({folder: [*FLAGS, *small_data, "--strategy", name, "--devices", "2"] for name, folder in runs.items()})
    return runs


@pytest.fixture(
    params=["baseline", *(pytest.param(f"deepspeed_stage_{n}", marks=pytest.mark.distributed) for n in (2, 3))]
)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    if request.param == "baseline":
        return request.getfixturevalue("baseline")
    return run_folder.newest_checkpoint(request.getfixturevalue("sharded")[request.param])


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(7, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 2 - 1


def evaluated(checkpoint: Path) -> nn.Module:
    """Returns the model that cifar-zero evaluate tests."""
    net = models.build("net", 10).eval()
    net.load_state_dict(read_weights(net, checkpoint))
    return net


@torch.inference_mode()
def test_every_format_has_the_scores_of_the_checkpoint(checkpoint: Path, images: Tensor, tmp_path: Path):
    images = images.contiguous(memory_format=torch.channels_last)  # as in a Classifier: the last bits depend on it
    expected = evaluated(checkpoint)(images)
    one_of_two = WHOLE or "deepspeed_stage_2" not in str(checkpoint)  # a conversion to ONNX takes seconds
    chosen = {name: TOLERANCES[name] for name in TOLERANCES if one_of_two or name != "onnx"}
    for name, tolerance in chosen.items():
        output = tmp_path / "exports" / f"net.{name}"
        output.parent.mkdir(exist_ok=True)
        formats.export(checkpoint, output, name)
        scores = formats.load(str(output)).scores
        torch.testing.assert_close(scores(images), expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(scores(images).argmax(1), expected.argmax(1))
    assert {file.name for file in output.parent.iterdir()} == {f"net.{name}" for name in chosen}


def test_a_user_reads_the_exports_with_only_torch(baseline: Path, images: Tensor, tmp_path: Path):
    folder = run_folder_of(baseline.parents[3])
    done = run_program("export", str(folder), "--to", "onnx")
    assert_ok(done)
    assert re.search(r"last\.onnx: net, 62,006 parameters, 0\.\d\d MB", done.stdout)
    formats.export(baseline, baseline.with_suffix(".safetensors"), "safetensors")
    np.save(tmp_path / "images.npy", images.numpy())
    code = "import sys, numpy, torch\nimages = torch.from_numpy(numpy.load(sys.argv[1]))\nfound = []\n"
    for snippet in SNIPPETS:
        code += snippet + "\nif 'net' in dir(): found.append(net(images).tolist()); del net\n"
    code += "assert not {'lightning', 'deepspeed'} & set(sys.modules)\nprint(found)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "images.npy")],
        cwd=baseline.parent,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert_ok(done)
    with torch.inference_mode():
        expected = evaluated(baseline)(images)
    assert len(SNIPPETS) == 2
    (scores,) = json.loads(done.stdout)
    # Rounded otherwise where that process has another number of threads.
    torch.testing.assert_close(torch.tensor(scores), expected, rtol=1e-5, atol=1e-6)


def test_metadata(baseline: Path, tmp_path: Path):
    for name in ("safetensors", "onnx"):
        formats.export(baseline, tmp_path / f"net.{name}", name)
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        metadata = file.metadata()
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    assert session.get_modelmeta().custom_metadata_map == metadata
    assert json.loads(metadata.pop("classes")) == [f"class {label}" for label in range(10)]
    assert metadata == {
        **{"format": "pt", "model": "net", "options": "{}", "image_size": "32"},
        **{"mean": "0.5", "std": "0.5", "dtype": "float32"},
        **{"checkpoint": "last.ckpt", "step": "6"},
    }
    assert str(ROOT).encode() not in (tmp_path / "net.onnx").read_bytes()


def checkpoint_of(net: nn.Module, name: str, options: dict[str, Any], classes: list[str], folder: Path) -> Path:
    """Returns a checkpoint with what an export needs."""
    state = {f"net.{key}": value for key, value in net.state_dict().items()}
    config = {"model": {"name": name, "options": options}, "data": {"root": str(folder)}}
    record = {"config": config, "classes": classes}
    torch.save({"state_dict": state, "global_step": 1, "cifar_zero": record}, folder / "net.ckpt")
    return folder / "net.ckpt"


class Other(nn.Module):
    """A model with what Net lacks: an option, buffers (one of integers), dropout, weights with two names."""

    def __init__(self, num_classes: int, width: int):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, width, 32), nn.BatchNorm2d(width), nn.Dropout(), nn.Flatten())
        self.last = self.tied = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.features(images))


@dataclass
class OtherModel:
    """The entry of Other in the registry."""

    width: int = 4

    def build(self, num_classes: int) -> nn.Module:
        return Other(num_classes, self.width)


@pytest.mark.parametrize("to", TOLERANCES)
def test_a_model_with_options_buffers_and_tied_weights(
    to: str, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(models.MODELS, "other", OtherModel)
    net = Other(3, width=5)
    net(images)  # moves BatchNorm's buffers
    checkpoint = checkpoint_of(net, "other", {"width": 5}, ["a", "b", "c"], tmp_path)
    output = tmp_path / f"net.{to}"
    formats.export(checkpoint, output, to)
    classifier = formats.load(str(output))
    assert classifier.classes == ("a", "b", "c")
    with torch.inference_mode():
        torch.testing.assert_close(classifier.scores(images), net.eval()(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("net_moe", {"num_experts": [2, 4], "mlp_type": "residual", "ep_size": 2}),
        ("net_moe", {"num_experts": [4], "eval_capacity_factor": 0.5}),
        ("vit_moe", {"num_experts": [4], "top_k": 2, "noisy_gate_policy": "Jitter"}),
    ],
    ids=["residual", "drops", "transformer"],
)
@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # of torch 2.11 itself
@pytest.mark.filterwarnings("error")  # torch warns where it has to try another way of exporting
@torch.inference_mode()
def test_mixtures_of_experts(name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The ranks over which the experts were spread in training do not matter."""
    monkeypatch.setitem(LAYOUTS, "tiny", Layout(width=32, depth=4, heads=2))  # ONNX takes 10 seconds for the real one
    torch.manual_seed(3)
    images = F.interpolate(torch.rand(20, 3, 2, 2) * 2 - 1, (32, 32))  # unlike one another, for different experts
    images = images.contiguous(memory_format=torch.channels_last)  # as in a Classifier: the last bits depend on it
    net = models.build(name, 10, **options).eval()
    for weight in (parameter for parameter in net.parameters() if parameter.dim() > 1):
        weight.mul_(3)  # the biases outweigh the images otherwise, and one expert takes them all
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


def test_keys_that_are_missing_or_unknown_are_refused(baseline: Path, tmp_path: Path):
    content = torch.load(baseline, weights_only=True)
    content["state_dict"]["net.fc3.extra"] = content["state_dict"].pop("net.fc3.bias")
    broken = tmp_path / "broken.ckpt"
    torch.save(content, broken)
    done = run_program("export", str(broken), "--to", "safetensors")
    assert done.returncode == 2
    assert re.fullmatch(r'error: .*another model: Missing.*"fc3.bias".*"fc3.extra".*\n', done.stderr)
    assert [file.name for file in tmp_path.iterdir()] == ["broken.ckpt"]


def test_an_export_with_other_scores_is_not_kept(baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    output = tmp_path / "net.safetensors"
    output.write_text("the one before")

    def wrong(weights: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
        return encode({**weights, "fc3.bias": weights["fc3.bias"] + 1e-6}, metadata)

    monkeypatch.setattr(formats, "encode", wrong)
    with pytest.raises(RunError, match="does not compute what the checkpoint does: scores differ by up to"):
        formats.export(baseline, output, "safetensors")
    assert output.read_text() == "the one before"
    assert [file.name for file in tmp_path.iterdir()] == ["net.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "tensorflow"], "invalid choice: 'tensorflow'"),
        ([], "required: --to"),
        (["--to", "onnx", "--output", "net.pt"], "must end in .onnx"),
        (["--to", "onnx", "--output", "nowhere/net.onnx"], "nowhere/net.onnx cannot be written"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, baseline: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(sys, "argv", ["export", str(baseline), *arguments])
    with pytest.raises(UsageError, match=re.escape(message)):
        export.main()


def test_a_checkpoint_is_never_overwritten(baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    named = tmp_path / "net.safetensors"
    named.write_bytes(baseline.read_bytes())
    monkeypatch.setattr(sys, "argv", ["export", str(named), "--to", "safetensors"])
    with pytest.raises(UsageError, match="is the checkpoint itself"):
        export.main()
    assert named.read_bytes() == baseline.read_bytes()
