"""The command line: what it accepts, what it refuses and how fast."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cifar_zero.config import command_line
from cifar_zero.config.recipe import AugmentConfig
from cifar_zero.config.settings import REGISTRIES
from cifar_zero.core.errors import UsageError
from tests.support.helpers import ROOT, run_program

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))


def test_bare_command_is_the_tutorial_with_a_validation_split():
    config = command_line.parse([])
    assert (config.placement.strategy, config.recipe.batch_size, config.recipe.epochs) == ("baseline", 4, 2)
    options = {"lr": 0.001, "momentum": 0.9, "weight_decay": 0.0, "weight_decay_on": "matrices", "nesterov": False}
    assert config.recipe.optimizer.options == options
    assert config.data.val_fraction == 0.1


def test_later_recipes_and_flags_win(tmp_path: Path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("epochs: 3\nseed: 1\noptimizer: {name: sgd, lr: 0.5, momentum: 0.3}\n")
    second.write_text("epochs: 4\noptimizer: {name: sgd, lr: 0.25}\n")
    config = command_line.parse(["--config", str(first), "--config", str(second), "--seed", "9"])
    assert (config.recipe.epochs, config.recipe.seed) == (4, 9)
    assert (config.recipe.optimizer.options["lr"], config.recipe.optimizer.options["momentum"]) == (0.25, 0.3)


def test_another_optimizer_drops_the_options_of_the_first():
    config = command_line.parse(
        ["--config", "configs/tutorial.yaml", "--optimizer", "adam", "--optimizer.betas", "[0.8, 0.99]"]
    )
    assert config.recipe.optimizer.name == "adam"
    options = {"eps": 1e-8, "weight_decay": 0.0, "weight_decay_on": "matrices"}
    assert config.recipe.optimizer.options == {"lr": 0.001, "betas": (0.8, 0.99), **options}


def test_augmentation_of_a_recipe_and_of_flags(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("augment: {flip: alternating, crop: 2}\n")
    config = command_line.parse(["--config", str(recipe), "--augment.crop", "4", "--augment.mixup", "0.2"])
    assert config.recipe.augment == AugmentConfig(flip="alternating", crop=4, mixup=0.2)
    recipe.write_text(command_line.dump(config))
    assert command_line.parse(["--config", str(recipe)]) == config


def test_short_forms():
    config = command_line.parse(["--logger", "tensorboard", "wandb", "--compile", "--trainer.limit_test_batches", "3"])
    assert config.output.logger == ["tensorboard", "wandb"]
    assert config.placement.compile is True
    assert config.recipe.trainer == {"limit_test_batches": 3}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_printed_configuration_is_the_same_run_again(recipe: Path, tmp_path: Path):
    config = command_line.parse(["--config", str(recipe), "--seed", "5"])
    again = tmp_path / "again.yaml"
    again.write_text(command_line.dump(config))
    assert command_line.parse(["--config", str(again)]) == config
    assert set(yaml.safe_load(recipe.read_text())) <= set(yaml.safe_load(again.read_text()))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lr 0.1", "unknown option --lr: did you mean --optimizer.lr?"),
        ("--momentum 0.9", "did you mean --optimizer.momentum?"),
        ("--nonsense 1", "--help all lists all options"),
        ("--optimizer.beta 0.9", "unknown option --optimizer.beta"),
        ("--optimizer adam --optimizer.beta 0.9", "did you mean --optimizer.betas?"),
        ("--strategy zero3", "unknown strategy 'zero3': choose from baseline, ddp, deepspeed_stage_0"),
        ("--precision fp16", "expected one of ['32-true', 'bf16-mixed', 'bf16-true', '16-mixed', 'auto'], not fp16"),
        ("--model gpt2", "vit_moe, torchvision:NAME, FILE.py:NAME"),
        ("--model tests/support/own_code.py", "name the class too, --model tests/support/own_code.py:NAME"),
        ("--data.sourc digits", "did you mean --data.source?"),
        ("--data.source mnist", "--data.source: expected one of ['auto', 'cifar10'"),
        ("--data.synthetic_size 9", "--data.synthetic_size must be at least 10"),
        ("--epoch 3", "did you mean --epochs?"),
        ("--epochs 1.5", "--epochs: expected int, not 1.5"),
        ("--epochs 0", "--epochs must be at least 1"),
        ("--precision 33", "expected one of ['32-true'"),
        ("--devices many", "--devices: expected int or one of ['auto'], not many"),
        ("--strategy deepspeed_stage_4", "did you mean deepspeed_stage_3?"),
        ("--model nett", "did you mean net?"),
        ("--optimizer adamm", "did you mean adam?"),
        ("--optimizer.betas 3", "unknown option --optimizer.betas"),
        ("--trainer.precision 16", "use --precision"),
        ("--trainer.accumulate_grad_batches 2", "use --accumulate"),
        ("--config nowhere.yaml", "nowhere.yaml cannot be read"),
        ("--config README.md", "is not YAML"),
        ("--data.val_fraction 1", "--data.val_fraction must be"),
        ("--data.val_fraction -0.1", "--data.val_fraction must be"),
        ("--plot_schedule notes.txt", "--plot_schedule notes.txt: give the name of a .png file"),
        ("--name a/b", "must be a plain name"),
        ("--name ..", "must be a plain name"),
        ("--name " + 300 * "x", "must be one line of at most 200 bytes"),
        ("--batch_size 100000000000000000000000", "--batch_size must be at least 1 and at most 2147483647"),
        ("--config", "--config has no value: name a YAML recipe"),
        ("--resume", "--resume has no value"),
        ("--max_steps 0", "--max_steps must be at least 1"),
        ("--seed -1", "--seed must be at least 0"),
        ("--timeout 0", "--timeout must be over 0"),
        ("--timeout 1e16", "at most 604800, not"),
        ("--bench_steps 5 --resume last", "leave --resume out"),
        ("--optimizer.lr -1", "--optimizer.lr must be at least 0"),
        ("--optimizer.momentum 2", "under 1"),
        ("--optimizer adam --optimizer.betas [2,3]", "--optimizer.betas must be"),
        ("--schedule warmup_lr --schedule.warmup_num_steps 0", "--schedule.warmup_num_steps must be"),
        ("--ds_config cifar_zero/config/deepspeed_examples.json --strategy ddp", "leave --strategy out"),
        ("--augment.flip sideways", "--augment.flip: expected one of ['none', 'random', 'alternating'], not sideways"),
        ("--augment.crop 17", "--augment.crop must be at most 16, for images of 32 x 32 pixels"),
        ("--augment.cutout -1", "--augment.cutout must be at least 0, not -1"),
        ("--augment.mixup .inf", "--augment.mixup must be at least 0 and finite, not inf"),
        ("--augment.flipp random", "did you mean --augment.flip?"),
        ("--augment.cutmix 1 --data.loader torch", "--augment.cutmix needs --data.loader memory"),
        ("--optimiser adam", "did you mean --optimizer?"),
        ("--optimizer.weight_decay_on biases", "expected one of ['matrices', 'all'], not biases"),
        ("--optimizer muon --optimizer.ns_steps 0", "--optimizer.ns_steps must be at least 1 and under 100"),
        ("--schedule cosine --schedule.total_steps -1", "--schedule.total_steps must be at least 0, not -1"),
        ("--schedule onecycle --schedule.pct_start 1", "--schedule.pct_start must be over 0 and under 1"),
        ("--bench_steps 5 --resume last", "--bench_steps starts at the first step"),
        ("stray", "stray"),
    ],
)
def test_mistakes_are_one_clear_line(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UsageError) as error:
        command_line.parse(flags.split())
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {val_fractoin: 0.2}", "did you mean --data.val_fraction?"),
        ("epochs:", "epochs has no value"),
        ("data: 3", "unknown option --data: did you mean --data."),
        ("augment: flip", "unknown option --augment: did you mean --augment.flip?"),
        ("augment: {cropp: 4}", "did you mean --augment.crop?"),
        ("3: 4", "has no options"),
        ("optimizer: {name: [a]}", "unknown optimizer"),
        ("optimizer: adamm", "unknown optimizer 'adamm': did you mean adam?"),
        ("optimizer: {name: sgd, lr: }", "optimizer.lr has no value"),
        ("epochs: many", "--epochs: expected int"),
        ("ds_config: 5", "--ds_config: expected str, not 5"),
        ("resume: [last]", "--resume: expected str, not ['last']"),
        ("name: 'two\n\n  lines'", "--name 'two\\nlines' must be one line of at most 200 bytes"),
        ("config: other.yaml", "config is of the command line only: leave it out"),
        ("print_config: true", "print_config is of the command line only: leave it out"),
    ],
)
def test_mistakes_in_a_recipe_are_refused(text: str, expected: str, tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(UsageError) as error:
        command_line.parse(["--config", str(recipe)])
    assert expected in str(error.value)


def test_help_alone_is_one_screen(capsys: pytest.CaptureFixture[str]):
    """With the flags that most people use, and the names that they take."""
    said = []
    for more in ([], ["all"]):
        with pytest.raises(SystemExit, match="0"):
            command_line.parse(["--help", *more])
        said.append(capsys.readouterr().out)
    assert said[0].count("\n") < 60 < 388 < said[1].count("\n")
    assert max(map(len, said[0].splitlines())) <= 118
    for shown in (
        "--batch_size",
        "deepspeed_stage_3",
        "torchvision:NAME",
        "bf16-mixed",
        "(default: 0.001)",
        "--help all lists",
    ):
        assert shown in said[0]
    assert "--zero.sub_group_size" in said[1]


@pytest.mark.parametrize(
    ("registry", "name"),
    [(registry, name) for registry, entries in REGISTRIES.items() for name in entries],
)
def test_every_choice_shows_its_options(registry: str, name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        command_line.parse([f"--{registry}", name, "--help", "all"])
    assert f"--{registry}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "code"),
    [(["--help"], 0), (["--print_config"], 0), (["--epochs", "x"], 2), (["--batch_size", "6", "--devices", "4"], 2)],
)
def test_answers_without_torch(flags: list[str], code: int):
    done = run_program("-X", "importtime", "train.py", *flags)
    assert done.returncode == code, done.stderr[-500:]
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "jsonargparse" in imported
    assert not imported & {"torch", "lightning", "deepspeed"}
    assert "Traceback" not in done.stderr
