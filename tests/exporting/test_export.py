"""Exports checkpoints: the scores must be equal, torch alone must read the files, and no bad file is kept. cifar-zero
predict returns the model's own classes for image files as users have them."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from cifar_zero.checkpoints.weights import encode
from cifar_zero.core.errors import RunError
from cifar_zero.data.augment import normalize
from cifar_zero.exporting import formats, predict
from cifar_zero.models import LAYOUTS, Layout
from cifar_zero.models.moe import gates
from tests.exporting.made_up import CLASSES, write_checkpoint
from tests.support.helpers import ROOT, assert_ok, of_test_all, refused, run_program

SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "runs.md").read_text(), re.DOTALL)

TOLERANCES = {"safetensors": 0.0, "onnx": formats.ONNX_TOLERANCE}


def test_a_user_reads_the_exports_with_only_torch(tmp_path: Path, run_command):
    net, images = write_checkpoint(tmp_path / "last.ckpt"), torch.rand(7, 3, 32, 32) * 2 - 1
    np.save(tmp_path / "images.npy", images.numpy())
    for to in TOLERANCES:
        code, out, _ = run_command("export", tmp_path / "last.ckpt", "--to", to)
        assert code == 0
        assert re.search(rf"last\.{to}: net, 62,006 parameters, 0\.\d\d MB", out)
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


IMAGES = {"image_size": "32", "mean": "0.5", "std": "0.5"}
"""The size and normalisation of CIFAR-10's images in an export's metadata."""


def test_a_folder_is_classified_by_a_checkpoint_and_its_export(tmp_path: Path):
    """Some images are in a subfolder, and there are files that are not images."""
    torch.manual_seed(1)
    checkpoint, folder = tmp_path / "net.ckpt", tmp_path / "images"
    net = write_checkpoint(checkpoint)
    formats.export(checkpoint, checkpoint.with_suffix(".safetensors"), "safetensors")
    (folder / "below").mkdir(parents=True)
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden").mkdir()
    for hidden in (".hidden.png", ".hidden/an.png"):
        (folder / hidden).write_text("no image")
    images = np.random.default_rng(0).integers(0, 256, (100, 3, 2, 2), np.uint8).repeat(16, axis=2).repeat(16, axis=3)
    for number, image in enumerate(images):
        Image.fromarray(image.transpose(1, 2, 0)).save(folder / ("below" if number >= 90 else "") / f"{number:02}.png")
    probabilities, labels = net(normalize(torch.tensor(images))).softmax(1).topk(2)
    assert len(labels[:, 0].unique()) > 4
    for network in (checkpoint, checkpoint.with_suffix(".safetensors")):
        done = run_program("predict", str(network), str(folder), "--top", "2", "--json")
        assert_ok(done)
        assert not done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert sorted(Path(line["file"]).stem for line in lines) == [f"{number:02}" for number in range(100)]
        for line in lines:
            number = int(Path(line["file"]).stem)
            assert [each["class"] for each in line["predictions"]] == [CLASSES[label] for label in labels[number]]
            actual = [each["probability"] for each in line["predictions"]]
            assert actual == pytest.approx(probabilities[number].tolist(), abs=1e-5)


def test_names_forge_no_line(tmp_path: Path):
    """Class names may come from another person's model, and names of images from another person's archive."""
    image, broken, network = (tmp_path / name for name in ("a\nb.png", "c\x1b[2K.png", "net.safetensors"))
    Image.new("RGB", (32, 32)).save(image)
    broken.write_text("")
    about = {**IMAGES, "model": "net", "options": "{}", "classes": json.dumps(["x\n\u202esafe.png: é"] * 10)}
    network.write_bytes(encode(write_checkpoint(tmp_path / "net.ckpt").state_dict(), about))
    done = run_program("predict", str(network), str(broken), str(image))  # what can be read is classified
    assert done.returncode == 2
    assert re.fullmatch(r".*a\\nb\.png: x\\n\\u202esafe\.png: é \d+\.\d %\n", done.stdout)
    assert re.fullmatch(r"error: cannot read the image .*c\\x1b\[2K\.png: it is not a PNG.*\n", done.stderr)


@pytest.mark.parametrize(
    ("model", "images", "message"),
    [
        ("last.ckpt", "empty", "no .png, .jpg, .jpeg images in"),
        ("last.ckpt", "a.png --top 0", "--top must be at least 1, not 0"),
        ("last.ckpt", "a.png --model mlp", "give FILE.py:NAME"),
        ("plain.safetensors", "a.png", "does not name its model: give a checkpoint of cifar-zero train"),
        ("moe.safetensors", "a.png", 'comes from another model: Missing key(s) in state_dict: "fc3.'),
        ("evil.safetensors", "a.png", "torchvision:resnet18 (kwargs.checkpoint_path must be a number"),
        ("unclear.safetensors", "a.png", "unclear.safetensors: classes is not JSON"),
        ("cut.onnx", "a.png", "damaged or not an ONNX file"),
        ("cut.safetensors", "a.png", "damaged or not a safetensors file"),
    ],
)
@pytest.mark.filterwarnings("error")  # a warning is a second line
def test_mistakes_of_predict(model: str, images: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    weights = write_checkpoint(Path("last.ckpt")).state_dict()
    content = Path("last.ckpt").read_bytes()
    classes = json.dumps(CLASSES)
    evil = json.dumps({"kwargs": {"checkpoint_path": "evil.pth"}})
    files = {
        "plain.safetensors": encode(weights, {}),
        "moe.safetensors": encode(weights, {**IMAGES, "model": "net_moe", "options": "{}", "classes": classes}),
        "evil.safetensors": encode(
            {}, {**IMAGES, "model": "torchvision:resnet18", "options": evil, "classes": classes}
        ),
        "unclear.safetensors": encode({}, {"model": "net", "options": "{}", "classes": "[" * 100_000}),
        "cut.onnx": content[:1000],
        "cut.safetensors": content[:1000],
        "a.png": b"",
    }
    for name, written in files.items():
        Path(name).write_bytes(written)
    Path("empty").mkdir()
    monkeypatch.setattr(sys, "argv", ["predict", model, *images.split()])
    with refused(message):
        predict.main()
