"""Reads a hand-written DeepSpeed folder with experts, of a kind that small runs do not produce."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cifar_zero.checkpoints.zero_folder import LAYOUT, PARTS, PROGRESS, TIED, read_folder
from cifar_zero.core.errors import UsageError
from cifar_zero.optimizers.groups import by_name

LOCAL, RANKS = 3, 2
"""Number of experts on each rank, and number of ranks."""

NAMES = ["net.gate.wg.weight", *(f"net.experts.{number}.bias" for number in range(LOCAL * RANKS))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a checkpoint of a gate with weight -1 and six experts, each with its number as weight. The float32
    weights are larger by 100."""
    main = {
        "module": {"net.deepspeed_moe.gate.wg.weight": torch.tensor([-1.0])},
        "buffer_names": [],
        "num_experts": [LOCAL * RANKS],
        "dp_world_size": RANKS,
        "ds_config": {"zero_optimization": {"stage": 2}},
        LAYOUT: {"ep_size": RANKS},
        PROGRESS: [],
        TIED: {},
    }
    torch.save(main, tmp_path / "mp_rank_00_model_states.pt")
    for number in range(LOCAL * RANKS):
        expert = {f"net.deepspeed_moe.experts.deepspeed_experts.{number}.bias": torch.tensor([float(number)])}
        torch.save(expert, tmp_path / f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
    param_groups: list[dict[str, Any]] = [{"params": [0], "name": "dense"}]
    param_groups += [{"params": [number], "moe": True, "name": f"ep_size_{RANKS}"} for number in (1, 2)]
    for rank in range(RANKS):
        own = [*range(LOCAL * rank, LOCAL * (rank + 1))]
        names = [NAMES[1 + number] for number in own]
        gate = [-1] if rank == 0 else []  # sharded over both ranks, but the second rank's shard is empty
        flat = [torch.tensor(values, dtype=torch.float32) for values in (gate, own[:2], own[2:])]
        state = {number: {"exp_avg": values, "step": torch.tensor(7.0)} for number, values in enumerate(flat)}
        base = {"state": state, "param_groups": param_groups}
        shard = {"single_partition_of_fp32_groups": [values + 100 for values in flat], "base_optimizer_state": base}
        size = torch.Size([1])
        parts = [{NAMES[0]: (size, 0, 0, len(gate))}]
        parts += [{name: (size, 0, at, 1) for at, name in enumerate(group)} for group in (names[:2], names[2:])]
        file = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": shard, PARTS: parts}, file)
    return tmp_path


def test_experts_that_deepspeed_has_split_into_two_groups_are_assembled(folder: Path):
    """DeepSpeed splits groups of 178,956,971 or more parameters, even in the middle of a mixture."""
    actual = read_folder(folder)
    assert [*actual["state_dict"]] == NAMES
    expected = dict(zip(NAMES, map(float, range(-1, LOCAL * RANKS)), strict=True))
    assert {name: value.item() - 100 for name, value in actual["state_dict"].items()} == expected
    states = by_name(actual["optimizer_states"][0])
    assert {name: state["exp_avg"].item() for name, (_, state) in states.items()} == expected


@pytest.mark.parametrize("what", ["zero_pp_rank_1_mp_rank_00_optim", "layer_0_expert_4_mp_rank_00_model"])
def test_a_missing_file_is_refused(what: str, folder: Path):
    (folder / f"{what}_states.pt").unlink()
    with pytest.raises(UsageError, match="is incomplete"):
        read_folder(folder)
