"""Tests the data module's exact splits, and its loaders, which Lightning drives epoch by epoch."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from cifar_zero.config.recipe import AugmentConfig
from cifar_zero.config.settings import DataConfig, make_settings
from cifar_zero.core.errors import UsageError
from cifar_zero.data.dataset import IGNORED, stratified_split
from cifar_zero.launch.local_launcher import free_port
from datamodule import CIFARDataModule
from tests.support.helpers import run_program


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig("synthetic", root=str(tmp_path), synthetic_size=205, workers=1)


def test_the_split_is_exact_in_every_class_and_seeded():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
    train, val = stratified_split(labels, 0.1, seed=0)
    assert np.bincount(labels[train]).tolist() == [4500] * 10
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


class Recorder(LightningModule):
    """Trains nothing, and records the images and labels that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = defaultdict[str, list[torch.Tensor]](list)

    def record(self, stage: str, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.seen[f"{stage} images"].append(batch[0])
        self.seen[stage].append(batch[1])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_index: int) -> None:
        self.record("train", batch)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_index: int) -> None:
        self.record("val", batch)

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_index: int):
        self.record("test", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight])


def record(
    config: DataConfig, tmp_path: Path, augment: AugmentConfig | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    """Returns what a module gets in two epochs of `fit` and in `test`, all batches concatenated."""
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, default_root_dir=tmp_path, num_sanity_val_steps=0,
        **options,
    )  # fmt: skip
    datamodule = CIFARDataModule(make_settings(data=config, augment=augment or AugmentConfig(), batch_size=8, seed=7))
    recorder = Recorder()
    trainer.fit(recorder, datamodule=datamodule)
    trainer.test(recorder, datamodule=datamodule, verbose=False)
    return {name: torch.cat(batches) for name, batches in recorder.seen.items()}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_lightning_sees_the_same_from_both_loaders(config: DataConfig, tmp_path: Path):
    memory, tutorial = record(config, tmp_path), record(replace(config, loader="torch"), tmp_path)
    assert memory.keys() == tutorial.keys()
    for name in memory:
        assert torch.equal(memory[name], tutorial[name]), name
    assert (memory["test"] != IGNORED).sum() == 205
    assert (memory["val"] != IGNORED).sum() == 2 * 20


def test_only_training_images_are_augmented_and_each_epoch_has_its_order(config: DataConfig, tmp_path: Path):
    plain, mixed = (record(config, tmp_path, augment) for augment in (None, AugmentConfig(crop=4, mixup=1.0)))
    assert torch.equal(plain["val images"], mixed["val images"])
    assert torch.equal(plain["val"], mixed["val"])
    assert not torch.equal(mixed["train images"], plain["train images"])
    assert mixed["train"].shape == (2 * 184, 10)
    first, second = plain["train"].chunk(2)
    assert not torch.equal(first, second)
    limited = record(config, tmp_path, limit_train_batches=3)["train"]
    assert torch.equal(limited, torch.cat([first[:24], second[:24]]))


@pytest.mark.distributed
def test_nodes_with_other_images_are_refused(tmp_path: Path):
    """There are two ranks on separate nodes. The second node has ten images more."""
    flags = ["--accelerator", "cpu", "--data.source", "synthetic", "--max_steps", "4", "--batch_size", "8"]
    flags += ["--data.root", str(tmp_path), "--out", str(tmp_path / "out"), "--logger", "none"]
    nodes = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    nodes |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor(2) as pool:
        starts = [
            pool.submit(
                run_program,
                *("train.py", *flags, "--data.synthetic_size", str(size)),
                env={**nodes, "RANK": str(rank)},
                fresh=True,  # a warm start runs one program after the other
            )
            for rank, size in enumerate((205, 215))
        ]
    for done in (start.result() for start in starts):
        assert done.returncode == 2
        line = done.stderr.splitlines()[-1]
        assert "has 215 training and 215 test images, which differ from the 205 training and 205 test images of" in line
        assert "give all nodes the same files" in line
