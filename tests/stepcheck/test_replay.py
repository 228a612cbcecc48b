"""A replay judges the loss, gradients and buffers that the training's own forward and backward passes compute."""

import copy
import itertools
import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stepcheck import Replay, audit
from stepcheck.engines.adapter import RankInfo, plain_name
from stepcheck.replay import compare, memory
from stepcheck.replay import replay as replay_module
from stepcheck.replay.plain_copy import MicroBatch, PlainCopy, buffers_of
from stepcheck.replay.random_state import random_state
from tests.support.suite import WHOLE

WIDTH, STEPS = 48, 3
SEEDS = range(10 if WHOLE else 4)


class Model(nn.Module):
    """A small network with a normalisation of each kind, dropout, and a tensor of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.batch_norm, self.layer_norm = nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.batch_norm(self.first(x)))
        x = self.dropout(x + self.second(self.layer_norm(x)))
        return self.third(x) * self.scale


class OtherLinear(torch.autograd.Function):
    """A linear layer whose sums are split in two, as by another kernel on a GPU. With `rounds`, both halves are rounded
    to the low precision before they are added."""

    rounds = False

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        half = a.shape[1] // 2
        one, other = a[:, :half].float() @ b[:half].float(), a[:, half:].float() @ b[half:].float()
        if OtherLinear.rounds:
            one, other = one.to(a.dtype).float(), other.to(a.dtype).float()
        return (one + other).to(a.dtype)

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # pyright: ignore
        context.save_for_backward(x, weight)
        return OtherLinear.product(x, weight.t()) + bias

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # pyright: ignore
        x, weight = context.saved_tensors
        return OtherLinear.product(gradient, weight), OtherLinear.product(gradient.t(), x), gradient.sum(0)


def use_other_kernels(model: Model) -> None:
    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        weight, bias = layer.weight, layer.bias
        if torch.is_autocast_enabled("cpu"):
            x, weight, bias = (each.to(torch.bfloat16) for each in (x, weight, bias))
        with torch.autocast("cpu", enabled=False):
            result: Any = OtherLinear.apply(x, weight, bias)
        return result

    for layer in (model.first, model.second, model.third):
        layer.forward = partial(forward, layer)  # pyright: ignore


def loss_of(batch: tuple[Tensor, Tensor], autocasts: bool, model: nn.Module) -> Tensor:
    images, labels = batch
    context = torch.autocast("cpu", torch.bfloat16) if autocasts else nullcontext()
    with context:
        return F.cross_entropy(model(images.to(next(model.parameters()).dtype)).float(), labels) / 2


def train(
    change: Any = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    autocasts: bool = False,
    kind: type[Model] = Model,
    trained: str = "",
    **options: Any,
) -> tuple[Any, Model]:
    """Trains the weights with `trained` in their names of a model that `change` has changed after the copy was made.
    Returns the verdict, and the model."""
    torch.manual_seed(seed)
    model = kind() if dtype == torch.float32 else kind().to(dtype)
    plain = Replay(copy.deepcopy(model), **options)
    if change:
        change(model)
    weights = [each for name, each in model.named_parameters() if trained in name]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    with audit(model, optimizer, on_fault="warn", replay=plain) as audited:
        for _ in range(STEPS):
            for _ in range(2):
                batch = torch.randn(16, WIDTH), torch.randint(0, WIDTH, (16,))
                compute = partial(loss_of, batch, autocasts)
                plain.micro_batch(compute)
                loss = compute(model)
                plain.loss(loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return audited.verdict, model


PRECISIONS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"autocasts": True},
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_kernels_are_bit_identical(precision: str):
    verdict, _ = train(**PRECISIONS[precision])
    assert verdict.outcome == "agrees"
    assert verdict.replayed == verdict.identical == STEPS


@pytest.mark.parametrize("rounds", [False, True], ids=["order", "split"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_kernels_raise_no_alarm(precision: str, rounds: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OtherLinear, "rounds", rounds)
    for seed in SEEDS:
        verdict, _ = train(use_other_kernels, seed, **PRECISIONS[precision])
        assert verdict.identical < verdict.replayed == STEPS
        assert not verdict.findings


class Scaled(torch.autograd.Function):
    """Passes a gradient back that is too large by this factor."""

    factor = 1.01

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # pyright: ignore
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return Scaled.factor * gradient


class Overflows(torch.autograd.Function):
    """Passes no gradient back, but a value that is not finite."""

    value = math.nan

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # pyright: ignore
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return torch.full_like(gradient, Overflows.value)


class OverflowsInScale(Model):
    """A model in which only the gradient of `scale` is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.batch_norm(self.first(x)))
        return self.third(x + self.second(self.layer_norm(x))) * Overflows.apply(self.scale)


def after(layer: str, function: Any) -> Any:
    return lambda model: getattr(model, layer).register_forward_hook(lambda part, inputs, output: function(output))


CHANGES: dict[str, tuple[Any, str]] = {
    "a cast to bfloat16": (after("second", lambda y: y.bfloat16().float()), "replayed gradient"),
    "a wrong backward pass": (after("first", Scaled.apply), "replayed gradient"),
    "another dropout": (lambda model: setattr(model, "dropout", nn.AlphaDropout(0.1)), "replayed gradient"),
    "a loss that is larger": (after("third", lambda y: y + 1e-3 * y.detach()), "replayed loss"),
    "statistics that move too far": (
        lambda model: model.batch_norm.register_forward_hook(
            lambda part, *_: setattr(part, "running_mean", 1.01 * part.running_mean)
        ),
        "replayed buffer",
    ),
    "statistics that do not move": (
        lambda model: model.batch_norm.register_forward_hook(
            lambda part, *_: setattr(part, "running_mean", torch.zeros(WIDTH))
        ),
        "replayed buffer",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_forward_and_backward_passes_compute_wrongly_is_found(name: str):
    change, kind = CHANGES[name]
    verdict, _ = train(change)
    assert verdict.outcome == "different"
    first = [each for each in verdict.findings if each.step == 1]
    assert kind in {each.kind for each in first}, first


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("change", [use_other_kernels, after("first", Scaled.apply)], ids=["kernels", "fault"])
def test_a_gradient_that_is_not_finite_hides_no_other(change: Any, value: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Overflows, "value", value)
    verdict, _ = train(change, kind=OverflowsInScale)
    first = [each.text for each in verdict.findings if each.step == 1]
    assert bool(first) == (change is not use_other_kernels), first
    assert all("the gradient of first." in text for text in first)


def test_gradients_that_autocast_loses_in_the_copy_too_are_found(monkeypatch: pytest.MonkeyPatch):
    """As where autocast uses a weight again that it has cast under `no_grad` (torch issue 142234; not torch 2.15)."""

    class Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            lost = torch.is_autocast_enabled("cpu") and self.weight.dtype == torch.float32  # which autocast casts
            return F.linear(x, self.weight.detach() if lost else self.weight, self.bias)

    monkeypatch.setattr(nn, "Linear", Linear)
    assert train()[0].outcome == "agrees"
    first = train(autocasts=True)[0].findings[0]
    assert (first.step, first.kind) == (1, "replayed gradient")
    assert "the training computed none" in first.text


def test_the_first_module_with_another_output_is_named():
    verdict, _ = train(after("layer_norm", lambda y: 1.001 * y), outputs=True)
    (found,) = [each for each in verdict.findings if each.step == 1 and each.kind == "output"]
    assert "layer_norm" in found.text


def test_only_the_parts_that_wrappers_add_leave_a_name():
    class Own(nn.Module):
        def __init__(self, module: nn.Module):
            super().__init__()
            self.module = module

    wrapped = nn.DataParallel(Own(Own(nn.DataParallel(nn.Linear(1, 1)))))
    names = [plain_name(wrapped, name) for name, _ in wrapped.named_modules()]
    assert names == ["", "", "module", "module.module", "module.module"]
    assert plain_name(wrapped, "module.module.module.module.weight") == "module.module.weight"
    compiled = nn.DataParallel(torch.compile(Model()))  # pyright: ignore
    assert {plain_name(compiled, name) for name, _ in compiled.named_modules()} == {
        name for name, _ in Model().named_modules()
    }


def test_a_module_with_an_attribute_module_is_replayed():
    class Wrapped(Model):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.third = self.third, nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.module(super().forward(x) / self.scale) * self.scale

    assert train(kind=Wrapped)[0].replayed == STEPS
    assert train(after("module", Scaled.apply), kind=Wrapped)[0].outcome == "different"


def test_a_value_that_is_not_a_number_is_the_worst_of_its_kind():
    first, wrong = (
        compare.Compared("replayed gradient", name, error, 1e-3, 1) for name, error in (("a", 0.0), ("b", math.nan))
    )
    assert [*compare.worst([first, wrong])] == [wrong]
    assert wrong.share > 1
    assert "is off by inf of its norm" in str(compare.Compared("replayed gradient", "a", math.inf, 1e-3, 1))


def test_only_chosen_weights_are_compared():
    change = after("first", Scaled.apply)
    assert train(change, only="second|third")[0].outcome == "agrees"
    assert train(change, only="first")[0].outcome == "different"
    assert "no trained weight has a name with 'frist', such as batch_norm.bias" in str(train(only="frist")[0])


class Complex(Model):
    """A model with complex weights, of which the gradients have imaginary parts."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.turned(torch.complex(x, x.flip(1))).abs())


class Conjugated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:  # pyright: ignore
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return gradient.conj()


@pytest.mark.filterwarnings("error:Casting complex values to real")
def test_imaginary_parts_are_compared():
    verdict, _ = train(use_other_kernels, kind=Complex)
    assert (verdict.outcome, verdict.replayed) == ("agrees", STEPS), str(verdict)
    found = train(after("turned", Conjugated.apply), kind=Complex)[0].findings
    assert "the gradient of turned." in found[0].text


class Draws(Model):
    """A model that multiplies a layer's output by random numbers, in one of several ways."""

    draw: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch_norm(self.first(x))
        return self.third(x * (1 + Draws.draw(x)) + self.second(self.layer_norm(x))) * self.scale


DRAWS: dict[str, Any] = {
    "rand": lambda x: torch.rand(len(x), 1, dtype=x.dtype) < 0.5,
    "rand_like": lambda x: torch.rand_like(x) < 0.5,
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "gumbel": F.gumbel_softmax,
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3),
    "float32": lambda x: torch.rand(len(x), 1, dtype=torch.float32).to(x.dtype),
}


@pytest.mark.parametrize(("precision", "factor"), [("float32", 1.01), ("bfloat16", 1.1)])
@pytest.mark.parametrize("draw", DRAWS)
def test_float64_has_the_random_numbers_of_the_training(
    draw: str, precision: str, factor: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Draws, "draw", DRAWS[draw])
    monkeypatch.setattr(Scaled, "factor", factor)
    verdict, _ = train(use_other_kernels, kind=Draws, **PRECISIONS[precision])
    assert (verdict.outcome, verdict.replayed) == ("agrees", STEPS), str(verdict)
    found = train(after("first", Scaled.apply), kind=Draws, **PRECISIONS[precision])[0].findings
    assert "the gradient of first." in found[0].text


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (lambda x: torch.rand(1) if x.dtype == torch.float64 else 0.5, "other random numbers in a later replay"),
        (lambda x: 9.0 if x.dtype == torch.float64 else 0.5, "the tolerance of many gradients is 0.5 of their norm"),
    ],
    ids=["draws", "computes"],
)
def test_a_step_that_float64_computes_otherwise_is_not_judged(draw: Any, reason: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Draws, "draw", draw)
    verdict, _ = train(use_other_kernels, kind=Draws)
    assert (verdict.replayed, verdict.findings) == (0, []), str(verdict)
    assert reason in verdict.not_judged["the replay of step 1"]


class Teacher(Model):
    """A model with weights and buffers that its forward pass uses, and does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.teacher(x) * self.average + super().forward(x)


def follows(model: Any) -> None:
    """Moves the teacher and the average after each forward pass, as hooks of a training do."""

    def move(output: Tensor) -> None:
        model.teacher.weight.data = 0.9 * model.teacher.weight + 0.1 * model.third.weight.detach()
        model.average.mul_(0.9).add_(output.detach().mean(0))

    after("third", move)(model)


def test_weights_and_buffers_may_change_between_micro_batches():
    verdict, _ = train(follows, kind=Teacher)
    assert (verdict.outcome, verdict.identical) == ("agrees", STEPS), str(verdict)
    assert "something other than the forward pass changes average" in str(verdict)
    assert train(lambda model: (follows(model), after("first", Scaled.apply)(model)), kind=Teacher)[0].findings


class Bank(Model):
    """A model with a large attribute, from which its forward pass reads."""

    writes = False

    def __init__(self) -> None:
        super().__init__()
        self.bank: Any = torch.zeros(30)

    def forward(self, x: Tensor) -> Tensor:
        bank = self.bank["rows"] if isinstance(self.bank, dict) else self.bank
        self.mask = getattr(self, "mask", torch.ones(30))  # a cache, which the first forward pass builds
        x = super().forward(x) * (1 + float(bank[0]))
        if self.writes:
            bank[:1] += 1.0
        return x


@pytest.mark.parametrize("kind", [lambda bank: bank, Tensor.numpy, lambda bank: {"rows": bank, "count": 1}])
def test_a_step_with_a_large_attribute_that_changes_is_not_judged(kind: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stepcheck.replay.plain_copy.LARGEST", 100)

    class Own(Bank):
        def __init__(self) -> None:
            super().__init__()
            self.bank = kind(self.bank)

    assert train(kind=Own)[0].identical == STEPS
    monkeypatch.setattr(Bank, "writes", True)
    verdict, _ = train(kind=Own)
    assert (verdict.replayed, verdict.findings) == (0, []), str(verdict)
    assert "the attribute bank changes, and is too large to be copied" in verdict.not_judged["the replay of step 1"]


class Recomputed(Model):
    """A model whose second layer is computed again in the backward pass, without gradients if its input needs none."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.batch_norm(self.first(x)))
        return self.third(checkpoint(self.second, x, use_reentrant=True)) * self.scale


@pytest.mark.parametrize("options", [{"only": "second"}, {"trained": "second"}])
def test_chosen_weights_in_reentrant_checkpointing_are_compared(options: Any):
    verdict, _ = train(kind=Recomputed, **options)
    assert (verdict.outcome, verdict.replayed) == ("agrees", STEPS), str(verdict)


class OtherInFloat64(Model):
    """A model that calls one module less in float64."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.batch_norm(self.first(x)))
        return self.third(x if x.dtype == torch.float64 else self.layer_norm(x)) * self.scale


def test_an_error_of_the_comparison_is_named_and_ends_nothing():
    verdict, _ = train(use_other_kernels, kind=OtherInFloat64, outputs=True)
    assert verdict.steps == STEPS
    assert not verdict.findings
    assert verdict.not_judged["the replay of step 1"].startswith("ValueError: zip() argument"), str(verdict)


def test_an_audit_that_ends_within_a_step_leaves_no_hooks():
    model = Model()
    plain = Replay(copy.deepcopy(model), outputs=True)
    with audit(model, torch.optim.SGD(model.parameters(), lr=0.1), replay=plain):
        plain.micro_batch(lambda module: module(torch.randn(4, WIDTH)).sum())
        assert model.first._forward_hooks
    assert not any(each._forward_hooks for each in model.modules())


class Calls(Model):
    """A model with a function that refers to the model. A deep copy of the model has the same function."""

    latest: Any = None

    def __init__(self) -> None:
        super().__init__()
        Calls.latest = self
        self.call: Any = self.function()

    def function(self) -> Any:
        return lambda x: Model.forward(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class CallsCompiled(Calls):
    def function(self) -> Any:
        return torch.compile(partial(Model.forward, self), backend="eager")


class CallsGlobal(Calls):
    def function(self) -> Any:
        return lambda x: Model.forward(Calls.latest, x)


class UsesWeight(Calls):
    def function(self) -> Any:
        return lambda x: F.linear(x, Calls.latest.first.weight)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Calls, "replays, because call has a function that calls the trained module"),
        (CallsCompiled, "replays, because call has a function that calls the trained module"),
        (CallsGlobal, "the replay of step 1, because RuntimeError: the copy of the module calls the trained module"),
        (UsesWeight, "the replay of step 1, because RuntimeError: the copy of the module calls the trained module"),
    ],
)
def test_a_copy_that_calls_the_trained_module_is_not_judged_and_changes_nothing(kind: type[Model], reason: str):
    verdict, model = train(kind=kind)
    assert (verdict.outcome, verdict.replayed) == ("agrees", 0), str(verdict)
    assert reason in str(verdict)
    expected = train(kind=kind, every=0)[1].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


class Scripted(Model):
    def __init__(self) -> None:
        super().__init__()
        # Without a linear layer, because DeepSpeed's ZeRO 3 may have replaced its function in this process.
        part: Any = torch.jit.script(nn.Sequential(nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)))
        self.second = part


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_part_in_torchscript_is_replayed():
    verdict, _ = train(kind=Scripted)
    assert (verdict.outcome, verdict.replayed) == ("agrees", STEPS), str(verdict)


def test_hooks_get_gradients_without_the_loss_scale():
    model = Model().bfloat16()
    plain, seen = PlainCopy(copy.deepcopy(model)), []
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    compute = partial(loss_of, (torch.randn(16, WIDTH), torch.arange(16)), False)
    batch = MicroBatch(compute, (), random_state(), {})
    for scale in (1.0, 1024.0):
        plain.keep(weights, buffers_of(model), weights)
        plain.compute([batch], scale=scale, then=lambda module: seen.append(module.first.weight.grad))
    assert seen[1].dtype == torch.float32
    assert torch.allclose(*seen)


def test_a_replay_that_does_not_fit_into_memory_is_not_judged(monkeypatch: pytest.MonkeyPatch):
    """The ranks of a node share its memory, whoever has started them."""
    monkeypatch.setattr(RankInfo, "all_gather", lambda self, own: [own, own])
    monkeypatch.setattr(replay_module, "available", lambda device, ranks: 1000.0 if ranks == 2 else None)
    verdict, _ = train()
    assert not verdict.replayed
    assert verdict.steps == STEPS
    assert "it needs up to" in str(verdict)


def test_a_replay_changes_nothing_of_the_training():
    weights = [train(every=every)[1].state_dict() for every in (0, 1)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def rounded_to_tf32(x: Tensor) -> Tensor:
    """Rounds to 10 bits after the point."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_tf32_in_the_training_alone_raises_no_alarm_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch):
    product = OtherLinear.product
    monkeypatch.setattr(OtherLinear, "product", lambda a, b: product(rounded_to_tf32(a), rounded_to_tf32(b)))
    assert train(use_other_kernels)[0].outcome == "different"
    monkeypatch.setattr(compare, "epsilon", lambda dtype, device: 2.0**-10)
    assert not [each for seed in SEEDS for each in train(use_other_kernels, seed)[0].findings]


GPU = torch.device("cuda", 0)


def test_the_epsilon_is_that_of_the_format_that_multiplies(monkeypatch: pytest.MonkeyPatch):
    cudnn: Any = torch.backends.cudnn
    kinds: Any = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    before = [each.fp32_precision for each in kinds]
    try:
        for each in kinds:
            each.fp32_precision = "ieee"
        assert compare.epsilon(torch.float32, GPU) == torch.finfo(torch.float32).eps
        kinds[1].fp32_precision = "tf32"
        assert compare.epsilon(torch.float32, GPU) == 2.0**-10
        assert compare.epsilon(torch.bfloat16, GPU) == torch.finfo(torch.bfloat16).eps
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        assert compare.epsilon(torch.float32, GPU) == torch.finfo(torch.float32).eps
    finally:
        for each, value in zip(kinds, before, strict=True):
            each.fp32_precision = value


class Unsteady(Model):
    """Multiplies by numbers that no replay can restore, as a device that computes wrongly now and then would."""

    numbers = itertools.cycle([1.0, 1.0, 1.3, 1.3, 1.3, 1.3, 0.7, 0.7])  # training, two replays, and the third

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.numbers)


def test_a_step_whose_two_replays_differ_is_not_judged():
    verdict, _ = train(kind=Unsteady)
    assert not verdict.findings
    assert not verdict.replayed
    assert verdict.not_judged["the replay of step 1"].startswith("RuntimeError: two replays of it differ on cpu (")


class UnsteadyBuffer(Model):
    """A model with a buffer that no replay can restore, and with random numbers of its own that a replay restores."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(1))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.noise.fill_(  # pyright: ignore[reportCallIssue]
            next(Unsteady.numbers)
        )
        return super().forward(x) * (1 + torch.rand(1, generator=self.generator))


def test_an_unsteady_buffer_hides_no_gradient():
    verdict, _ = train(kind=UnsteadyBuffer)
    assert (verdict.outcome, verdict.replayed) == ("agrees", STEPS), str(verdict)
    verdict, _ = train(after("first", Scaled.apply), kind=UnsteadyBuffer)
    assert {each.kind for each in verdict.findings if each.step == 1} == {"replayed gradient"}, str(verdict)
    assert (
        "two replays of it differ on cpu (the replayed buffer of noise" in verdict.not_judged["some replayed buffers"]
    )


def test_compiled_dropout_is_not_judged():
    verdict, _ = train(lambda model: model.compile(backend="eager"))
    assert "torch.compile draws other random numbers" in str(verdict)
    assert verdict.steps == STEPS


def test_memory_that_torch_keeps_is_free(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 50)
    assert memory.available(GPU) == 40


def test_the_peak_memory_leaves_replays_out(monkeypatch: pytest.MonkeyPatch):
    peaks = [100]
    monkeypatch.setattr(memory, "_peaks", {})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.__setitem__(0, 50))
    memory.begin_replay(GPU)
    peaks[0] = 900
    memory.end_replay(GPU)
    assert memory.peak(GPU) == 100
    peaks[0] = 120
    assert memory.peak(GPU) == 120


def test_a_replay_that_fails_leaves_no_tensors(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("stepcheck.replay.plain_copy._backward", fail)
    torch.manual_seed(0)
    model = Model()
    plain = Replay(copy.deepcopy(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit(model, optimizer, on_fault="warn", replay=plain) as audited:
        compute = partial(loss_of, (torch.randn(16, WIDTH), torch.randint(0, WIDTH, (16,))), False)
        plain.micro_batch(compute)
        compute(model).backward()
        optimizer.step()
    assert "OutOfMemoryError: no memory" in str(audited.verdict)
    assert plain.actual is None
    assert not plain.copy._weights
    assert all(each.untyped_storage().nbytes() <= 4 for each in plain.copy.module.parameters())
