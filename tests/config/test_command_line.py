"""Tests what the command line accepts and what it refuses."""

import json
from pathlib import Path

import pytest

from cifar_zero.config import command_line
from cifar_zero.config.recipe import AugmentConfig, Choice
from cifar_zero.config.settings import Settings, flat
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers import Adam
from tests.support.helpers import ROOT, refused

BOMB = "a0: &a0 [1, 1]\na1: &a1 [*a0, *a0]\na2: [*a1, *a1]\n"
"""The start of a file with aliases that stand for more values than memory holds."""


def test_later_recipes_and_flags_win(tmp_path: Path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(
        "epochs: 3\nseed: 1\noptimizer: {name: sgd, lr: 0.5, momentum: 0.3}\naugment: {flip: random, crop: 2}\n"
    )
    second.write_text("epochs: 4\noptimizer: {name: sgd, lr: 0.25}\n")
    flags = ["--config", str(first), "--config", str(second), "--seed", "9", "--augment.crop", "4"]
    recipe = command_line.parse(flags).recipe
    assert (recipe.epochs, recipe.seed) == (4, 9)
    assert (recipe.optimizer.options["lr"], recipe.optimizer.options["momentum"]) == (0.25, 0.3)
    assert recipe.augment == AugmentConfig(flip="random", crop=4)


def test_options_of_the_trainer_are_merged(tmp_path: Path):
    dotted, mapping = tmp_path / "dotted.yaml", tmp_path / "mapping.yaml"
    dotted.write_text("trainer.limit_train_batches: 100\ntrainer.benchmark: false\n")
    mapping.write_text("trainer: {limit_train_batches: 100, benchmark: false}")
    for recipe in (dotted, mapping):
        for flags in (["--trainer", "{benchmark: true}"], ["--trainer.benchmark", "true"]):
            trainer = command_line.parse(["--config", str(recipe), *flags]).recipe.trainer
            assert trainer == {"limit_train_batches": 100, "benchmark": True}


def test_another_optimizer_drops_the_options_of_the_first():
    flags = ["--config", str(ROOT / "configs" / "tutorial.yaml"), "--optimizer", "adam"]
    config = command_line.parse([*flags, "--optimizer.betas", "[0.8, 0.99]"])
    assert config.recipe.optimizer == Choice("adam", vars(Adam(betas=(0.8, 0.99))))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lr 0.1", "unknown option --lr: did you mean --optimizer.lr?"),
        ("--nonsense 1", "--help all lists all options"),
        ("--optimizer.betas 3", "unknown option --optimizer.betas"),
        ("--trainable+ fc3.*", "unknown option --trainable+: did you mean --trainable?"),
        ("--data digits", "unknown option --data: did you mean --data."),
        ("--trainer.accumulate_grad_batches 2", "use --accumulate"),
        ('--trainer {"benchmark":true} --trainer.benchmark true', "both set benchmark: leave one of them out"),
        ('--trainer.benchmark true --trainer {"benchmark":true}', "both set benchmark: leave one of them out"),
        ('--trainer {"max_steps":2}', "--trainer.max_steps is not passed on to the Trainer: use --max_steps"),
        ('--trainer.a {"b":1} --trainer.a.b 2', "--trainer.a and --trainer.a.b cannot be combined"),
        ('--trainer.a.b 2 --trainer.a {"b":1}', "--trainer.a and --trainer.a.b cannot be combined"),
        ("--trainable --seed 1", "--trainable has no value"),
        ("--print_config maybe", "--print_config: expected bool, not maybe"),
        ("stray", "unexpected 'stray': options begin with --"),
        ("--seed 1 2", "--seed takes one value, not 2: put '1 2' in quotes"),
        ("--optimizer", "--optimizer has no value"),
        ("--config", "--config has no value: name a YAML recipe"),
        ("--config nowhere.yaml", "nowhere.yaml cannot be read: No such file or directory"),
        ("--config configs/zero3.yaml", "cannot be read: No such file or directory; did you mean configs/zero_3.yaml?"),
        ("--config README.md", "is not YAML"),
        ("--strategy zero3", "unknown strategy 'zero3': choose from baseline, ddp, deepspeed_stage_0"),
        ("--strategy deepspeed_stage_4", "did you mean deepspeed_stage_3?"),
        ("--model gpt2", "torchvision:NAME, FILE.py:NAME"),
        ("--model tests/users_code/own_code.py", "name the class too, --model tests/users_code/own_code.py:NAME"),
        ("--precision fp16", "expected one of ['32-true', 'bf16-mixed', 'bf16-true', '16-mixed', 'auto'], not fp16"),
        ("--epochs 1.5", "--epochs: expected int, not 1.5"),
        ("--batch_size 1:30", "--batch_size: expected int, not 1:30"),  # 90 in YAML 1.1
        ("--optimizer.learning_rate 1", "unknown option --optimizer.learning_rate: did you mean --optimizer.lr?"),
        ("--gpus 2", "unknown option --gpus: did you mean --devices?"),
        ("--batch_size 100000000000000000000000", "--batch_size must be at least 1 and at most 2147483647"),
        ("--devices many", "--devices: expected int or one of ['auto'], not many"),
        ("--max_steps 0", "--max_steps must be at least 1"),
        ("--name a/b", "must be a plain name"),
        ("--name ..", "must be a plain name"),
        ("--name " + 300 * "x", "must be one line of at most 200 bytes"),
        ("--bench_steps 5 --resume last", "--bench_steps starts at the first step: leave out --resume"),
        ("--ds_config cifar_zero/config/deepspeed_examples.json --strategy ddp", "leave out --strategy"),
        ("--early_stopping 2 --data.val_fraction 0", "--early_stopping needs validation"),
        ("--monitor val/f1 --trainer.limit_val_batches 0", "--monitor needs validation"),
        ("--data.normalize grey", "--data.normalize grey: give half, cifar, imagenet, or mean,std as 2 or 6 numbers"),
        ("--data.normalize 0.5,0", "std above 0"),
        ("--data.normalize 0.5,nan", "as 2 or 6 numbers"),
        ("--data.image_size 64", "--data.image_size 64 needs --data.source folder"),
        ("--data.image_size 64 --data.source folder --augment.cutout 65", "--augment.cutout must be at most 64"),
        ("--augment.crop 17", "--augment.crop must be at most 16, for images of 32 x 32 pixels"),
        ("--augment.mixup .inf", "--augment.mixup must be at least 0 and finite, not inf"),
        ("--augment.cutmix 1 --data.loader torch", "--augment.cutmix needs --data.loader memory"),
        ("--optimizer adam --optimizer.betas [2,3]", "--optimizer.betas must be"),
        ("--schedule onecycle --schedule.pct_start 1", "--schedule.pct_start must be over 0 and under 1"),
        ("--model torchvision:resnet18 --model.kwarg.a 1", "--model.kwarg.a: did you mean --model.kwargs?"),
        ("--model net_moe --model.num_experts []", "must be numbers from 1, one for each mixture, not []"),
        ("--model net_moe --model.num_experts two", "num_experts: expected a list of int, not two"),
        ("--model net_moe --model.num_experts [4,2] --model.ep_size 4", "ep_size 4 does not divide num_experts 2"),
        ("--model net_moe --model.top_k 2 --model.num_experts [2,1]", "top_k 2 needs at least as many experts"),
        ("--model net_moe --model.top_k 2 --model.noisy_gate_policy RSample", "RSample works only with top_k 1"),
        ("--model vit_moe --model.num_experts [2,4]", "must be one number, or one for each of 6 mixtures"),
    ],
)
def test_mistakes_are_one_clear_line(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    with refused(expected):
        command_line.parse(flags.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {val_fractoin: 0.2}", "did you mean --data.val_fraction?"),
        ("epochs:", "epochs has no value"),
        ("augment: flip", "unknown option --augment: did you mean --augment.flip?"),
        ("3: 4", "has no options"),
        ("optimizer: {name: [a]}", "unknown optimizer"),
        ("optimizer: {name: sgd, lr: }", "optimizer.lr has no value"),
        ("resume: [last]", "--resume: expected str, not ['last']"),
        ("name: 'two\n\n  lines'", "--name 'two\\nlines' must be one line of at most 200 bytes"),
        ("batch_size: 1:30", "--batch_size: expected int, not 1:30"),
        ("seed: 1\nseed: 2", "line 2 sets seed again"),
        ("optimizer: {lr: 1, lr: 2}", "line 1 sets lr again"),
        ("optimizer: {lr: 1}\noptimizer.lr: 2", "sets optimizer.lr twice"),
        ("optimizer: sgd\noptimizer.name: adam", "sets optimizer twice"),
        ("optimizer: {name: sgd, lr: 1, options: {lr: 2}}", "unknown option --optimizer.options"),
        ("trainer: {a: {b: 1}}\ntrainer.a.b: 2", "--trainer.a and --trainer.a.b cannot be combined"),
        ("config: other.yaml", "config works only on the command line: remove it"),
        ("debug: true", "debug works only on the command line: remove it"),
        (BOMB, "line 2 has the alias *a0: repeat the value"),
        ("trainer: " + json.dumps({"x": BOMB}), "trainer.x contains an alias"),
        pytest.param("name: " + "[" * 2000, "nested too deeply", id="deep"),
        ("trainer: " + "[" * 30 + "]" * 30, "or more than 20 nested levels"),
        ("name: 2026-02-30", "day is out of range"),
        ("name: 2026-02-03", "name is a date: write a number"),
        ("name: !!python/name:os.system", "could not determine a constructor"),
    ],
)
def test_mistakes_in_a_recipe_are_refused(text: str, expected: str, tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with refused(expected):
        command_line.parse(["--config", str(recipe)])


def test_switches_take_each_form_of_a_bool(capsys: pytest.CaptureFixture[str]):
    given = {"--trust": True, "--trust yes": True, "--trust True": True, "--trust no": False, "--trust=false": False}
    for flags, expected in given.items():
        assert command_line.parse([*flags.split(), "--print_config", "false"]).consent.trust == expected
    assert not capsys.readouterr().out


def test_a_name_is_also_an_option_of_its_section():
    assert command_line.parse(["--optimizer.name", "adam"]) == command_line.parse(["--optimizer", "adam"])


def test_an_empty_value_is_refused_unless_it_overrides_a_recipe(tmp_path: Path):
    texts = [option for option, default in flat(Settings()).items() if default == ""]
    assert {"resume", "weights", "ds_config", "data.cache"} <= {*texts}
    for option in texts:
        for flags in ([f"--{option}", ""], [f"--{option}="]):
            with pytest.raises(UsageError, match=f"--{option} has an empty value"):
                command_line.parse(flags)
    (tmp_path / "recipe.yaml").write_text("weights: old.safetensors\n")
    assert command_line.parse(["--config", str(tmp_path / "recipe.yaml"), "--weights", ""]).recipe.weights == ""
