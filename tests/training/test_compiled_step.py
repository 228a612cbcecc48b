"""`--compile step`: what a GPU would do with the graph. tests/distributed/test_strategies.py compares the weights."""

from pathlib import Path
from typing import Any

import pytest
from torch._inductor.output_code import CompiledFxGraph

from cifar_module import CIFARModule
from cifar_zero.config.flags import Choice, Config, DataConfig
from cifar_zero.training import build
from cifar_zero.training.resolve import resolve
from datamodule import CIFARDataModule


def test_a_cuda_graph_can_replay_all_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch runs a graph without a CUDA graph, and does not say so, if it writes to an input whose address may change:
    a gradient, or state of the optimizer."""
    graphs = list[CompiledFxGraph]()
    post_compile: Any = CompiledFxGraph.post_compile

    def recorded(graph: CompiledFxGraph, *args: Any, **kwargs: Any) -> None:
        graphs.append(graph)
        post_compile(graph, *args, **kwargs)

    monkeypatch.setattr(CompiledFxGraph, "post_compile", recorded)
    images = DataConfig(source="synthetic", synthetic_size=64, root=str(tmp_path), cache=str(tmp_path))
    steps: dict[str, Any] = {"compile": "step", "max_steps": 4, "batch_size": 8}
    run = resolve(Config(accelerator="cpu", model=Choice("mlp"), optimizer=Choice("muon"), data=images, **steps))
    trainer = build.trainer(run, tmp_path / "run")
    trainer.fit(CIFARModule(run.config, run.num_classes), CIFARDataModule(run.config))
    (graph,) = graphs  # it was compiled once
    assert graph.mutated_input_idxs
    assert set(graph.mutated_input_idxs) <= set(graph.fx_kwargs.get("static_input_idxs", ()))
