"""Compares each optimizer step of ZeRO 0 to 3 with float64 PyTorch on two CPU ranks (DeepSpeed issue 2790).

    pytest test_zero_matches_pytorch.py

Needs DeepSpeed, torch and pytest only. One launch of two gloo ranks trains all cases, each for three steps of SGD. The
change of the weights in a step, divided by the learning rate, must be the mean gradient of all micro-batches of all
ranks. A float64 copy of the model computes this gradient from the weights before the step, so that errors of earlier
steps do not count, and the tolerance is a rounding error.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

STEPS, RANKS, BATCH, LEARNING_RATE = 3, 2, 4, 0.5
STAGES_AND_OFFLOAD = [(0, "none"), *itertools.product((1, 2, 3), ("none", "cpu"))]
# "by the caller": backward(loss / steps, scale_wrt_gas=False), as Accelerate and Lightning call the engine
ACCUMULATION = [(1, "by the engine"), (4, "by the engine"), (4, "by the caller")]
DTYPES = ["float32", "bfloat16"]
CASES = list(itertools.product(STAGES_AND_OFFLOAD, ACCUMULATION, DTYPES))
# Errors, as shares of the norms of the gradient and of the weight: bfloat16 has 8 significant bits, float32 has 24.
TOLERANCES = {"float32": (2e-6, 2**-23), "bfloat16": (0.03, 2**-8)}


def name_of(stage, offload, accumulate, scaled, dtype):
    return f"ZeRO {stage}, offload {offload}, accumulation {accumulate} scaled {scaled}, {dtype}"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Trains all cases in one launch. Returns, by case, the message of its first error, or an empty string."""
    file = tmp_path_factory.mktemp("zero") / "results.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, __file__, str(file)], env=environment, capture_output=True, text=True, timeout=600)
    assert file.exists(), done.stderr[-3000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("accumulate", "scaled"), ACCUMULATION)
@pytest.mark.parametrize(("stage", "offload"), STAGES_AND_OFFLOAD)
def test_zero_matches_pytorch(results, stage, offload, accumulate, scaled, dtype):
    assert results[name_of(stage, offload, accumulate, scaled, dtype)] == ""


class Model(torch.nn.Module):
    """A layer used twice, a parameter of its own, and sizes that two ranks do not divide."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(10, 13)
        self.twice = torch.nn.Linear(13, 13)
        self.scale = torch.nn.Parameter(torch.ones(13))
        self.last = torch.nn.Linear(13, 3)

    def forward(self, x):
        return self.last(self.scale * torch.tanh(self.twice(torch.tanh(self.twice(self.first(x))))))


def loss_of(model, dtype, *position):
    """Returns the loss of a micro-batch, whose `position` (step, number and rank) determines its values."""
    torch.manual_seed(hash(position) % 2**31)
    images, targets = torch.randn(BATCH, 10), torch.randn(BATCH, 3)
    # The oracle, too, computes from the values that the engine is given.
    images = images.to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    weight = next(model.parameters())
    return torch.nn.functional.mse_loss(model(images.to(weight.dtype)).to(torch.float64), targets.to(torch.float64))


def weights_of(model):
    from deepspeed.utils import safe_get_full_fp32_param

    values = {}
    for name, parameter in model.named_parameters():
        full = safe_get_full_fp32_param(parameter)  # None where the optimizer is not sharded
        values[name] = (parameter if full is None else full).detach().double().clone()
    return values


def expected_gradients(weights, dtype, step, accumulate):
    """Returns the mean gradient of all micro-batches of all ranks, computed in float64."""
    model = Model().double()
    used = {name: value.bfloat16().double() if dtype == "bfloat16" else value for name, value in weights.items()}
    model.load_state_dict(used)
    places = list(itertools.product(range(accumulate), range(RANKS)))
    for place in places:
        (loss_of(model, dtype, step, *place) / len(places)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def first_error(stage, offload, accumulate, scaled, dtype):
    """Trains a case. Returns the message of its first wrong gradient, or an empty string."""
    import deepspeed

    torch.manual_seed(1)
    model = Model().to(getattr(torch, dtype))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if offload != "none":
        config["zero_optimization"]["offload_optimizer"] = {"device": offload}
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    of_gradient, of_weight = TOLERANCES[dtype]
    for step in range(STEPS):
        before = weights_of(engine.module)
        for micro_batch in range(accumulate):
            loss = loss_of(engine, dtype, step, micro_batch, torch.distributed.get_rank())
            if scaled == "by the caller":
                engine.backward(loss / accumulate, scale_wrt_gas=False)
            else:
                engine.backward(loss)
            engine.step()
        after = weights_of(engine.module)
        for name, expected in expected_gradients(before, dtype, step, accumulate).items():
            actual = (before[name] - after[name]) / LEARNING_RATE
            error = float((actual - expected).norm())
            tolerance = of_gradient * float(expected.norm()) + of_weight * float(before[name].norm()) / LEARNING_RATE
            if not error <= tolerance:
                times = float((actual * expected).sum() / expected.norm() ** 2)
                return (
                    f"step {step + 1}: gradient of {name} off by {error / float(expected.norm()):.2g} of its norm "
                    f"(tolerance {tolerance / float(expected.norm()):.2g}), {times:.3g} times the expected one"
                )
    engine.destroy()
    return ""


def main():
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    errors = {}
    for (stage, offload), (accumulate, scaled), dtype in CASES:
        case = stage, offload, accumulate, scaled, dtype
        try:
            errors[name_of(*case)] = first_error(*case)
        except Exception as error:  # the same on both ranks: a case that does not run does not hide the others
            errors[name_of(*case)] = f"cannot run: {type(error).__name__}: {error}"
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(errors, indent=1))


if __name__ == "__main__":
    main()
