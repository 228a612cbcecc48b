"""A DeepSpeed configuration trains under train.py as in DeepSpeedExamples' loop, with DeepSpeed's own optimizer."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from cifar_module import CIFARModule
from cifar_zero.config import command_line
from cifar_zero.config.ds_config import get_ds_config
from cifar_zero.launch.local_launcher import free_port, variables
from datamodule import CIFARDataModule
from tests.support.helpers import largest_difference, last_weights, run_folder_of, train_all

STEPS = 12


@pytest.mark.usefixtures("own_process_group")
def test_a_run_ends_with_the_weights_of_deepspeeds_own_loop(
    tmp_path: Path, small_data: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Large weight decay distinguishes AdamW from Adam. A short warm-up and clipping change every step."""
    content: dict[str, Any] = get_ds_config(1, "fp32") | {"gradient_clipping": 0.1}
    content["optimizer"]["params"] |= {"weight_decay": 0.5, "torch_adam": True}  # DeepSpeed's would be compiled
    content["scheduler"]["params"]["warmup_num_steps"] = 5
    (tmp_path / "their.json").write_text(json.dumps(content))
    flags = ["--ds_config", str(tmp_path / "their.json"), *small_data, "--accelerator", "cpu", "--devices", "1"]
    train_all({tmp_path / "ours": [*flags, "--max_steps", str(STEPS)]})

    import deepspeed

    from stepcheck.engines.deepspeed import compile_no_collective

    compile_no_collective()
    for name, value in variables(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    config = command_line.parse(flags)
    module, data = CIFARModule(config, num_classes=10), CIFARDataModule(config)
    module.configure_model()
    data.prepare_data()
    data.setup()
    net: Any = module.net
    start = {name: value.clone() for name, value in net.state_dict().items()}
    initialize: Any = deepspeed.initialize  # its annotations are narrower than what it accepts and returns
    engine, *_ = initialize(model=net, model_parameters=net.parameters(), config=content)
    for images, labels in islice(data.train_dataloader(), STEPS):
        engine.backward(F.cross_entropy(engine(images), labels))
        engine.step()
    ours, reference = last_weights(run_folder_of(tmp_path / "ours")), net.state_dict()
    assert largest_difference(ours, {name: value.detach() for name, value in reference.items()}) < 1e-6
    assert largest_difference(ours, start) > 0.001
