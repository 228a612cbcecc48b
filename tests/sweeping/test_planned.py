from __future__ import annotations

import pytest

from errors import UsageError
from sweeping.planned import check, check_names, planned, whole_numbers
from sweeping.space import space

REST = ["--data.source", "synthetic", "--accelerator", "cpu", "--batch_size", "16"]


def test_the_runs_of_a_setting() -> None:
    searched = space(["optimizer.lr=0.1,0.01", "augment.flip=none,random", "seed=3,4"])
    setting = searched.combinations()[1]
    runs = planned(searched, 1, setting, REST, "val/acc")
    assert [run.name for run in runs] == [f"optimizer.lr_0.1-augment.flip_random-seed_{seed}" for seed in (3, 4)]
    assert [run.seed for run in runs] == [run.config.seed for run in runs] == [3, 4]
    assert runs[0].config.optimizer.options["lr"] == 0.1
    assert runs[0].config.hparams == ["optimizer.lr", "augment.flip"]


def test_a_sampled_setting_has_the_number_of_its_trial() -> None:
    searched = space(["optimizer.lr=0.01..0.1"])
    (run,) = planned(searched, 12, {"optimizer.lr": "0.0123456789"}, REST, "val/acc")
    assert run.name == "trial_012-optimizer.lr_0.0123"
    assert run.config.optimizer.options["lr"] == 0.0123456789


def test_a_recipe_is_named_by_its_file() -> None:
    searched = space(["config=configs/mlp.yaml,configs/tutorial.yaml"])
    (run,) = planned(searched, 0, searched.combinations()[0], [*REST, "--data.val_fraction", "0.1"], "val/acc")
    assert (run.name, run.config.model.name, run.config.hparams) == ("config_mlp", "mlp", [])
    with pytest.raises(UsageError, match="two values would share a folder"):
        check_names(space(["config=a/mlp.yaml,b/mlp.yaml"]))


def test_which_are_whole_numbers() -> None:
    searched = space(["batch_size=16..32:16", "optimizer.lr=1..2"])
    assert whole_numbers(searched, check(searched, REST[:-2], "val/acc")[0]) == {"batch_size"}


@pytest.mark.parametrize(
    ("search", "more", "message"),
    [
        ("optimizer.lrr=0.1", "", "did you mean --optimizer.lr?"),
        ("sead=1", "", "did you mean --seed?"),
        ("seed=0,-1", "", "--seed must be from 0"),
        ("optimizer=sgd,adm", "", "did you mean adam?"),
        ("optimizer.lr=0.1,fast", "", "expected float"),
        ("optimizer.lr=1e-4:1e-1:log", "", "expected float"),
        ("epochs=1..2:0.5", "", "the step must be a whole number"),
        ("epochs=1.5..2.5", "", "expected int"),
        ("optimizer.nesterov=0..1", "", "expected bool"),
        ("optimizer.lr=0.1", "--optimizer.lr 1", "is searched"),
        ("optimizer=sgd,adam", "--optimizer.name adam", "is searched"),
        ("optimizer=sgd,adam", "--optimizer.momentum 0.5", "unknown option --optimizer.momentum"),
        ("accumulate=1,3", "", "3"),
        ("optimizer.lr=0.1", "--resume last", "leave --resume out"),
        ("optimizer.lr=0.1", "--bench_steps 5", "leave out --bench_steps"),
        ("optimizer.lr=0.1", "--strategy auto", "plan.py says"),
        ("seed=1,01", "", "a seed is there twice"),
        ("optimizer.lr=0.1", "--hparams seed", "leave it out"),
        ("optimizer.lr=0.1", "--hparams=seed", "leave it out"),
        ("optimizer.lr=0.1", "--data.val_fraction 0", "needs validation images"),
        ("optimizer.lr=0.1", "--trainer.limit_val_batches 0", "needs a validation"),
    ],
)
def test_what_cannot_be_trained_is_refused(search: str, more: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        check(space([search]), [*REST, *more.split()], "val/acc")


@pytest.mark.parametrize(("metric", "message"), [("test/acc", "the test is for"), ("val/ac", "did you mean val/acc")])
def test_a_metric_that_chooses_nothing(metric: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(space(["optimizer.lr=0.1"]), REST, metric)
