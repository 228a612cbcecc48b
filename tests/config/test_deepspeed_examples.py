"""DeepSpeedExamples' training/cifar: its configuration, and its flags in those of train.py."""

import re
import shlex

from cifar_zero.config import command_line
from cifar_zero.config.ds_config import get_ds_config
from tests.support.helpers import ROOT


def test_a_configuration_for_each_dtype():
    assert [get_ds_config(0, dtype)["fp16"]["enabled"] for dtype in ("fp32", "bf16", "fp16")] == [False, False, True]


def test_the_recipe_is_what_the_configuration_says():
    """But for the optimizer: DeepSpeed runs an "Adam" without adam_w_mode as AdamW."""
    recipe = command_line.parse(["--config", str(ROOT / "configs" / "deepspeed.yaml")])
    theirs = command_line.parse(["--ds_config", str(ROOT / "cifar_zero" / "config" / "deepspeed_examples.json")])
    assert theirs.recipe.optimizer.name == "adamw"
    assert theirs.recipe.optimizer.options == recipe.recipe.optimizer.options
    for option in ("batch_size", "gradient_clip_val", "schedule"):
        assert theirs.option(option) == recipe.option(option)


def test_the_launch_lines_of_the_guide_train_a_mixture_of_experts():
    lines = re.findall("^deepspeed .*?train.py (.*)$", (ROOT / "docs" / "migration.md").read_text(), re.MULTILINE)
    dense, experts = (command_line.parse(shlex.split(line)) for line in lines)
    assert (dense.placement.strategy, dense.placement.precision) == ("deepspeed_stage_2", "bf16-mixed")
    options = experts.recipe.model.options
    assert (options["num_experts"], options["ep_size"], options["load_balance"]) == ([2], 2, 0)
