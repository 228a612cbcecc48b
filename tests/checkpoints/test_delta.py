"""A delta file holds only the trained weights. With the delta's base, every program reads the whole model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cifar_zero import models
from cifar_zero.build_model import create_model, trained_names
from cifar_zero.checkpoints.read import RECORD
from cifar_zero.checkpoints.weights import apply_delta, encode, read_plain, read_safetensors
from cifar_zero.config import command_line
from cifar_zero.config.settings import tree_of
from cifar_zero.core.errors import UsageError
from cifar_zero.exporting import formats
from tests.support.helpers import largest_difference, read_weights

FLAGS = ["--lora.rank", "2", "--lora.target", "fc1", "--trainable", "fc3.*", "--accelerator", "cpu"]
TRAINED = {"fc1.lora_a", "fc1.lora_b", "fc3.weight", "fc3.bias"}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    torch.save(models.build("net", 10).state_dict(), tmp_path / "base.pt")
    return tmp_path / "base.pt"


@pytest.fixture
def checkpoint(base: Path, small_data: list[str], tmp_path: Path) -> Path:
    """Returns a checkpoint of a run that started from the base, with made-up weights."""
    config = command_line.parse([*small_data, *FLAGS, "--weights", str(base)])
    net = create_model(config.recipe, 10)
    net.load_state_dict(torch.load(base), strict=False)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    record = {"config": tree_of(config), "classes": [f"class {label}" for label in range(10)]}
    torch.save({"state_dict": state, RECORD: record, "global_step": 7}, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


@pytest.fixture
def delta(checkpoint: Path, tmp_path: Path) -> Path:
    formats.export_delta(checkpoint, tmp_path / "last.delta.safetensors")
    return tmp_path / "last.delta.safetensors"


def test_a_delta_holds_only_the_trained_weights_and_restores_the_model_bit_for_bit(
    base: Path, checkpoint: Path, delta: Path
):
    assert load_file(delta).keys() == TRAINED
    expected = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert largest_difference(apply_delta(base, delta)["state_dict"], expected) == 0


def test_the_programs_read_a_delta(base: Path, checkpoint: Path, delta: Path, tmp_path: Path, run_command):
    images, adapted = torch.rand(3, 3, 32, 32), create_model(command_line.parse(FLAGS).recipe, 10).eval()
    read_weights(adapted, checkpoint)
    expected = formats.load_classifier(str(checkpoint)).scores(images)
    torch.testing.assert_close(expected, adapted(images))  # the adapters are merged into the weights
    assert torch.equal(formats.load_classifier(str(base), delta=str(delta)).scores(images), expected)
    whole = tmp_path / "whole.safetensors"
    assert run_command("export", base, "--delta", delta, "--to", "safetensors", "--output", whole)[0] == 0
    assert load_file(whole).keys() == torch.load(base).keys()  # no adapters: a plain model
    assert torch.equal(formats.load_classifier(str(whole)).scores(images), expected)
    tables = []
    for arguments in ([checkpoint], [base, "--delta", delta]):
        code, out, _ = run_command("evaluate", *arguments, "--accelerator", "cpu")
        assert code == 0
        tables.append(out.splitlines()[1:])
    assert tables[0] == tables[1]


def test_a_delta_that_names_no_dtype_is_refused(base: Path, delta: Path):
    content, metadata = read_safetensors(delta)
    delta.write_bytes(encode(content, {**metadata, "base_dtypes": '{"fc1.weight": "load"}'}))
    with pytest.raises(UsageError, match="is damaged, or another version"):
        apply_delta(base, delta)


def test_training_changes_the_statistics_of_layers_without_parameters():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2, affine=False))
    assert trained_names(net) == net.state_dict().keys()
    net[0].bias.requires_grad_(False)
    assert trained_names(net) == {"0.weight"}


def test_a_delta_belongs_only_to_its_base(base: Path, checkpoint: Path, delta: Path, tmp_path: Path):
    weights = torch.load(base)
    torch.save({**weights, "fc3.bias": torch.zeros(10)}, base)  # trained, so its value in the base does not matter
    apply_delta(base, delta)
    torch.save({**weights, "fc1.weight": weights["fc1.weight"] + 1e-6}, base)
    with pytest.raises(UsageError, match=r"does not belong to .* checksums"):
        apply_delta(base, delta)
    torch.save(models.build("vit_tiny", 10).state_dict(), base)
    with pytest.raises(UsageError, match=r"which lacks conv1\.weight"):
        apply_delta(base, delta)
    with pytest.raises(UsageError, match=f"export BASE --delta {delta}"):
        read_plain(delta)
    formats.export(checkpoint, tmp_path / "net.safetensors", "safetensors")
    with pytest.raises(UsageError, match=r"was not written by cifar-zero export --to delta"):
        apply_delta(base, tmp_path / "net.safetensors")
