"""Measures the training loop of DeepSpeedExamples' CIFAR-10 program, with its configuration, engine and loader, in
float32.

The source is https://github.com/deepspeedai/DeepSpeedExamples, training/cifar/cifar10_deepspeed.py (as of commit
45b4b71). The print every 2,000 mini-batches is left out.
"""

import json
import os
import sys
from typing import Any

import torch
from torch import nn

from benchmarks.loops import common
from benchmarks.loops.common import CIFAR10InMemory, Clock
from cifar_zero.launch import local_launcher, rank_environment
from cifar_zero.models.net import Net

BATCH_SIZE = 16  # images per step over all ranks, the program's train_batch_size


def train(cache: str, steps: int, stage: int) -> dict[str, float]:
    """Trains as one rank on the images in `cache` at a ZeRO stage from 0 to 3. Returns the measured figures. Every rank
    must call it, and at the end the process group is destroyed."""
    # DeepSpeed is imported in this function, because it reads DS_ACCELERATOR on import, and because the launching
    # process does not need it.
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from cifar_zero.config.ds_config import get_ds_config

    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # as DeepSpeed's own launcher does
    deepspeed.init_distributed()
    accelerator: Any = get_accelerator()
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    ds_config = get_ds_config(stage, "fp32")
    if accelerator.device_name() == "cuda":  # DeepSpeed's fused Adam for a GPU has to be compiled
        ds_config["optimizer"]["params"]["torch_adam"] = True
    trainset = CIFAR10InMemory(cache)
    net = Net()
    initialize: Any = deepspeed.initialize  # its annotations are narrower than what it accepts and returns
    parameters = filter(lambda parameter: parameter.requires_grad, net.parameters())
    model_engine, _, trainloader, _ = initialize(
        model=net,
        model_parameters=parameters,
        training_data=trainset,
        config=ds_config,
    )
    local_device = accelerator.device_name(model_engine.local_rank)
    criterion = nn.CrossEntropyLoss()

    clock = Clock(steps, BATCH_SIZE, torch.device(local_device))
    running_loss = 0.0
    for data in clock.over(trainloader):
        inputs, labels = data[0].to(local_device), data[1].to(local_device)
        outputs = model_engine(inputs)
        loss = criterion(outputs, labels)
        model_engine.backward(loss)
        model_engine.step()
        running_loss += loss.item()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return clock.figures()


def main() -> int:
    """Trains as one rank, or starts the ranks that train. Returns the exit code."""
    parser = common.parser(__doc__)
    parser.add_argument("--stage", type=int, choices=range(4), default=0, help="ZeRO stage (default: 0)")
    parser.add_argument("--ranks", type=int, default=1, help="on this machine (default: 1)")
    options = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = options.device  # otherwise DeepSpeed takes a GPU if there is one
    if not rank_environment.is_rank():
        return local_launcher.run_ranks(options.ranks, on_cpu=options.device == "cpu")
    figures = train(options.cache, options.steps, options.stage)
    if rank_environment.global_rank() == 0:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
