"""Compares the gate with DeepSpeed's, and the mixture with the weighted outputs of all experts."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from deepspeed.moe import sharded_moe
from torch import Tensor, nn

from cifar_zero import models
from cifar_zero.models import MixtureOptions, moe
from cifar_zero.models.moe import Gate, MixtureOfExperts
from cifar_zero.models.net import Net

TOKENS, WIDTH, EXPERTS = 50, 8, 4


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def options(**changed: Any) -> MixtureOptions:
    return MixtureOptions(num_experts=[EXPERTS], **changed)


def transparent_gate(**changed: Any) -> Gate:
    """Returns a gate whose logits are its tokens."""
    gate = Gate(EXPERTS, EXPERTS, options(**changed))
    with torch.no_grad():
        gate.wg.weight.copy_(torch.eye(EXPERTS))
    return gate


def layer(**changed: Any) -> MixtureOfExperts:
    """Returns a mixture of nonlinear experts whose gate has clear preferences."""
    mixture = MixtureOfExperts(
        WIDTH, EXPERTS, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), options(**changed)
    )
    with torch.no_grad():
        mixture.gate.wg.weight.mul_(10)
    return mixture


# DeepSpeed's gate, with the same logits and the same random numbers


@dataclass(frozen=True)
class Case:
    """Options of this project's gate, additional arguments of DeepSpeed's gate, and whether tokens are dropped."""

    options: dict[str, Any]
    deepspeed_arguments: dict[str, Any] = field(default_factory=dict)
    training: bool = True
    drops: bool = False


IN_EVALUATION = {"capacity_factor": 1.0, "drop_tokens": False}
CASES = {
    "top 1": Case({"capacity_factor": 4.0}),
    "top 1, minimum": Case({"capacity_factor": 0.1, "min_capacity": 9}, drops=True),
    "top 1, RSample": Case({"capacity_factor": 1.25, "noisy_gate_policy": "RSample"}, drops=True),
    "top 1, evaluation": Case({}, {**IN_EVALUATION, "use_rts": False}, training=False),
    "top 2": Case({"top_k": 2, "capacity_factor": 2.0}),
    "top 2, minimum": Case({"top_k": 2, "capacity_factor": 0.2, "min_capacity": 7}, drops=True),
    "top 2, evaluation": Case({"top_k": 2}, {**IN_EVALUATION, "top2_2nd_expert_sampling": False}, training=False),
    "top 2, evaluation, drops": Case(
        {"top_k": 2, "eval_capacity_factor": 0.7},
        {"capacity_factor": 0.7, "top2_2nd_expert_sampling": False},
        training=False,
        drops=True,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_gate_routes_as_deepspeeds_does(case: Case, monkeypatch: pytest.MonkeyPatch):
    uniform, noise = torch.rand(TOKENS, EXPERTS), -torch.rand(TOKENS, EXPERTS).log().neg().log()
    monkeypatch.setitem(sharded_moe.exp_selection_uniform_map, torch.device("cpu"), lambda shape: uniform)
    monkeypatch.setattr(sharded_moe, "gumbel_rsample", lambda shape, device: noise)
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: uniform)
    monkeypatch.setattr(moe, "gumbel", lambda like: noise)
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    deepspeed_logits = logits.detach().clone().requires_grad_()

    routing = transparent_gate(**case.options).train(case.training)(logits)
    same = {name: value for name, value in case.options.items() if name not in ("top_k", "eval_capacity_factor")}
    function = sharded_moe.top2gating if case.options.get("top_k") == 2 else sharded_moe.top1gating
    copy_of_logits = deepspeed_logits * 1  # it writes to its input in place
    actual: Any = function(
        copy_of_logits, **{"min_capacity": 0, **same, **case.deepspeed_arguments}, sparse_routes=True
    )
    loss, capacity, _, experts, slots, weights, sent = actual

    kept = experts >= 0
    assert kept.all() != case.drops
    assert routing.capacity == capacity
    assert torch.equal(routing.experts, experts.long())
    assert torch.equal(routing.slots[kept], slots.long()[kept])
    assert torch.equal(routing.weights, weights)
    assert torch.equal(routing.tokens, sent.clamp(max=capacity))  # DeepSpeed counts before dropping
    torch.testing.assert_close(routing.load_balance_loss, loss, rtol=2e-7, atol=0)  # the mean is taken at another point

    share = torch.randn_like(weights)
    for a_loss, a_weights in ((routing.load_balance_loss, routing.weights), (loss, weights)):
        (a_loss + (a_weights * share).sum()).backward()
    torch.testing.assert_close(logits.grad, deepspeed_logits.grad, rtol=1e-5, atol=1e-7)


# The layer, given the routing of its gate


def by_hand(mixture: Any, x: Tensor) -> Tensor:
    """Computes the mixture from the outputs of all experts for all tokens. A dropped token has the weight 0."""
    outputs = torch.stack([expert(x) for expert in mixture.experts])  # (experts, tokens, width)
    chosen = outputs[mixture.gate.routing.experts, torch.arange(len(x))]  # (choices, tokens, width)
    mixed = (mixture.gate.routing.weights[..., None] * chosen).sum(0)
    if mixture.options.mlp_type == "standard":
        return mixed
    of_experts, of_mlp = mixture.coefficient(x).softmax(1).split(1, dim=1)
    return mixed * of_experts + mixture.mlp(x) * of_mlp


@pytest.mark.parametrize("capacity_factor", [4.0, 0.5], ids=["all kept", "drops"])
@pytest.mark.parametrize("mlp_type", ["standard", "residual"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_outputs_and_gradients_are_those_of_the_weighted_experts(top_k: int, mlp_type: str, capacity_factor: float):
    mixture = layer(top_k=top_k, mlp_type=mlp_type, capacity_factor=capacity_factor)
    x, weights = torch.randn(TOKENS, WIDTH, requires_grad=True), torch.randn(TOKENS, WIDTH)
    outputs = mixture(x)
    routing: Any = mixture.gate.routing
    assert (routing.experts < 0).any() == (capacity_factor < 1)
    assert (routing.tokens > 0).all()
    expected = by_hand(mixture, x)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
    parameters = [x, *mixture.parameters()]
    sums = (outputs * weights).sum(), (expected * weights).sum()
    actual, wanted = (torch.autograd.grad(each, parameters, retain_graph=True) for each in sums)
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


def test_one_expert_is_the_dense_model():
    mixture: Any = models.build("net_moe", 10, num_experts=[1])
    (only,) = mixture.fc3
    dense: Any = Net(10)
    dense.fc3 = nn.Sequential(only.experts[0], mixture.fc4)
    dense.load_state_dict({**mixture.state_dict(), **dense.fc3.state_dict(prefix="fc3.")}, strict=False)
    images = torch.randn(20, 3, 32, 32)
    torch.testing.assert_close(mixture(images), dense(images), rtol=1e-6, atol=1e-7)


# Randomness


@pytest.mark.parametrize(("top_k", "noise"), [(1, "RSample"), (2, "Jitter")])
def test_in_evaluation_the_scores_of_an_image_depend_only_on_it(top_k: int, noise: str):
    net = models.build("net_moe", 10, num_experts=[EXPERTS], top_k=top_k, noisy_gate_policy=noise).eval()
    images = torch.randn(6, 3, 32, 32)
    with torch.inference_mode():
        scores = net(images)
        assert torch.equal(scores, net(images))
        one_by_one = torch.cat([net(image[None]) for image in images])
        torch.testing.assert_close(one_by_one, scores, rtol=1e-5, atol=1e-5)
