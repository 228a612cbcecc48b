"""Writes an HTML page with sliders, which shows the memory and the bytes sent of one rank under the strategies of
SHOWN."""

import json
from itertools import product
from pathlib import Path
from typing import Any

from cifar_zero.config.recipe import Choice
from cifar_zero.config.settings import Settings
from cifar_zero.config.strategy_specs import STRATEGIES
from cifar_zero.core.atomic import write
from cifar_zero.planning.activations import LinearFit, format_of
from cifar_zero.planning.estimates import MemoryBudget, estimate_all
from cifar_zero.planning.formulas import REUSE_ELEMENTS, Network, network_of, parameter_size
from cifar_zero.training.resolve import make_run

MODELS = ("vit_tiny", "vit_small", "vit_base", "vit_large", "vit_1b", "vit_13b")
IMAGES = 32  # micro-batch with which activations are counted; other sizes follow a straight line
PRECISIONS = ("32-true", "bf16-mixed")
DEVICES = tuple(2**exponent for exponent in range(11))
SHOWN = ("ddp", *(f"deepspeed_stage_{stage}{end}" for stage in (1, 2, 3) for end in ("", "_offload")))


def write_page(file: Path, settings: Settings) -> None:
    """Writes the page for one node without accumulation. The sliders replace the model, precision, devices and batch
    size of `settings`."""
    settings = settings.changed(num_nodes=1, accumulate=1)
    budget = MemoryBudget(0, None, elsewhere=True)  # nothing is compared with it
    parameters: dict[str, int] = {}
    rows: dict[str, list[float]] = {}
    for model in MODELS:
        settings = settings.changed(model=Choice(model), devices=1, batch_size=1)
        network = network_of(make_run(settings))
        parameters[model] = network.elements
        fits: dict[str, LinearFit] = {}
        for precision, devices in product(PRECISIONS, DEVICES):
            run = make_run(settings.changed(precision=precision, devices=devices, batch_size=IMAGES * devices))
            for need in estimate_all(run, network, budget, fits):
                if need.refused or need.strategy not in SHOWN:
                    continue
                spec = STRATEGIES[need.strategy]
                fit = fits[format_of(spec, precision)]
                sent = numbers_sent(spec.stage, network) * parameter_size(spec, precision) * (1 - 1 / devices)
                states, host = need.states.device.total + need.average, need.states.host.total + need.host_buffers
                row = [states, need.buckets, need.update, host, need.built_on_host, fit.base, fit.per_image, sent]
                rows[f"{model} {precision} {devices} {need.strategy}"] = row
    data: dict[str, Any] = {"parameters": parameters, "precisions": PRECISIONS, "devices": DEVICES, "rows": rows}
    data["activation_offload"] = settings.placement.activation_offload
    template = Path(__file__).with_suffix(".html").read_text()
    write(file, template.replace("DATA", json.dumps(data), 1).encode())


def numbers_sent(stage: int, network: Network) -> int:
    """Returns how many numbers each of N ranks sends in a step, without the factor (N - 1) / N (docs/cluster.md)."""
    if stage == 3:  # all parameters are gathered, again for the backward pass unless they are kept, and gradients sent
        return 2 * network.elements - min(REUSE_ELEMENTS // 2, network.elements) + network.trained
    return (3 if stage else 2) * network.trained
