"""A program that trains cases of `stepcheck accept` with DeepSpeed on one rank on the device of accelerator.py, and
prints a verdict for each strategy of its command line."""

import json
import os
import sys
import tempfile
from contextlib import nullcontext
from typing import Any

import torch

from tests.support import accelerator

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
DEVICE = accelerator.install()
torch.__future__.set_swap_module_params_on_conversion(False)  # it cannot swap tied weights

import deepspeed  # noqa: E402
import deepspeed.accelerator.real_accelerator as chosen  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # noqa: E402

from stepcheck.accept import train as accept  # noqa: E402
from stepcheck.accept.cases import ADAMW, Case  # noqa: E402
from stepcheck.accept.models import build_model  # noqa: E402
from stepcheck.engines.deepspeed import compile_no_collective  # noqa: E402


class Accelerator(CPU_Accelerator):
    """Makes DeepSpeed use the device."""

    def __init__(self) -> None:
        super().__init__()
        self._name = accelerator.NAME

    def device_name(self, device_index: Any = None) -> str:
        return accelerator.NAME if device_index is None else f"{accelerator.NAME}:{device_index}"

    def device(self, device_index: Any = None) -> Any:
        return nullcontext()

    def current_device_name(self) -> str:
        return str(DEVICE)

    def current_device(self) -> Any:
        return 0

    def on_accelerator(self, tensor: Any) -> bool:
        return tensor.device == DEVICE

    def communication_backend_name(self) -> str:
        return "gloo"


def build_on_device(case: Case) -> Any:
    with DEVICE:
        return build_model(case)


def main() -> None:
    chosen.set_accelerator(Accelerator())
    compile_no_collective()
    accept.STEPS = 2  # a tensor on another device shows in the first step, or as state in the second
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend="gloo")
        accept.build_model = build_on_device
        for strategy in sys.argv[1:]:
            verdict = accept.train(Case("", strategy=strategy, clip=0.1, accumulate=2, **ADAMW), DEVICE)
            print(json.dumps([strategy, verdict.outcome, verdict.replayed, str(verdict)]), flush=True)


if __name__ == "__main__":
    main()
