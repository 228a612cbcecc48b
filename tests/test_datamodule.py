"""Tests the data module's exact splits, and which images it augments and refuses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cifar_zero.config import command_line
from cifar_zero.config.recipe import AugmentConfig, DataConfig
from cifar_zero.config.settings import make_settings
from cifar_zero.core.errors import UsageError
from cifar_zero.data.dataset import stratified_split
from cifar_zero.launch import rank_environment
from datamodule import CIFARDataModule
from tests.support.helpers import on_ranks
from tests.support.many_runs import train_run


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig("synthetic", root=str(tmp_path), synthetic_size=205)


def test_the_split_is_exact_in_every_class_and_seeded():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
    train, val = stratified_split(labels, 0.1, seed=0)
    assert np.bincount(labels[val]).tolist() == [500] * 10
    assert sorted([*train, *val]) == list(range(50_000))
    np.testing.assert_array_equal(val, stratified_split(labels, 0.1, seed=0)[1])
    assert not np.array_equal(val, stratified_split(labels, 0.1, seed=1)[1])
    assert len(stratified_split(np.array([0, 0, 1]), 0.99, seed=0)[0]) == 2, "a class must not vanish from train"


def test_classes_too_small_to_hold_images_out(config: DataConfig, capsys: pytest.CaptureFixture[str]):
    small = replace(config, synthetic_size=30)
    datamodule = CIFARDataModule(make_settings(data=small))
    datamodule.setup()
    assert (datamodule.num_train, len(datamodule._val)) == (30, 0)
    assert "--data.val_fraction 0.1 holds out no image" in capsys.readouterr().err
    with pytest.raises(UsageError, match="and --early_stopping needs validation images"):
        CIFARDataModule(make_settings(data=small, early_stopping=2)).setup()


def test_only_training_images_are_augmented(config: DataConfig):
    plain, mixed = (
        CIFARDataModule(make_settings(data=config, augment=augment, batch_size=8))
        for augment in (AugmentConfig(), AugmentConfig(crop=4, mixup=1.0))
    )
    for datamodule in (plain, mixed):
        datamodule.setup()
    for name in ("val_dataloader", "test_dataloader"):
        for one, other in zip(getattr(plain, name)(), getattr(mixed, name)(), strict=True):
            assert all(map(torch.equal, one, other))
    (images, _), (augmented, labels) = (next(iter(each.train_dataloader())) for each in (plain, mixed))
    assert not torch.equal(images, augmented)
    assert labels.shape == (8, 10)


def train_with_other_images(flags: list[str]) -> None:
    """Trains as one of two ranks, of which the second has ten images more, as if it were on a second node."""
    size = 205 + 10 * rank_environment.global_rank()
    CIFARDataModule(command_line.parse([*flags, "--data.synthetic_size", str(size)])).prepare_data()
    differ = "has 215 training and 215 test images, which differ from the 205 training and 205 test images of"
    with pytest.raises(UsageError, match=f"{differ} .*: give all nodes the same files"):
        train_run([*flags, "--data.synthetic_size", str(size)], "")


@pytest.mark.distributed
def test_nodes_with_other_images_are_refused(tmp_path: Path):
    flags = ["--accelerator", "cpu", "--data.source", "synthetic", "--max_steps", "4", "--batch_size", "8"]
    flags += ["--devices", "2", "--data.root", str(tmp_path), "--out", str(tmp_path / "out"), "--logger", "none"]
    on_ranks(2, train_with_other_images, flags)
    assert not (tmp_path / "out").exists()
