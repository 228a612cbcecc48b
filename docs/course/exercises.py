"""Checks answers to exercises.md: `python docs/course/exercises.py N answers.py` prints one line and exits with 0 if
the answer is right, 1 if it is wrong, 2 for wrong usage. `all` instead of N checks every exercise, of one or more
files. Answers run in processes of their own, which can be ended."""

import argparse
import ast
import hashlib
import itertools
import json
import logging
import multiprocessing
import platform
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # for the new processes too, to which multiprocessing passes it on

# These modules need no package that is missing on Windows. The checks of NOT_ON_WINDOWS import the others.
from cifar_zero import models  # noqa: E402 - it is found now
from cifar_zero.core.errors import RunError, UsageError, short  # noqa: E402
from stepcheck.lightning import user_code  # noqa: E402

TOLERANCE = 1e-4  # relative; the rounding of float32 stays below it, and no mistake does
SECONDS = 120  # for an answer and the start of its processes
PATIENCE = timedelta(seconds=60)  # for one collective

Job = tuple[int, str]  # number of the exercise, file of the answer
Verdict = tuple[int, str]  # exit code, line


class Wrong(Exception):
    """An answer is wrong; the message says what differs, with numbers, and a hint."""


def main() -> int:
    """Prints whether answers are right; returns the exit code."""
    parser = argparse.ArgumentParser(prog="exercises.py", description="Checks answers to docs/course/exercises.md.")
    numbers = [str(number) for number in range(1, len(CHECKS) + 1)]
    parser.add_argument("exercise", choices=[*numbers, "all"], metavar="N|all", help="number of the exercise, or all")
    parser.add_argument("answers", nargs="+", type=Path, help="Python files with answers, one for each student")
    parser.add_argument("--submit", type=Path, metavar="FILE.json", help="writes points and verdicts of `all` as JSON")
    options = parser.parse_args()
    if missing := [str(file) for file in options.answers if not file.is_file()]:
        parser.error(f"{', '.join(missing)}: no such file")
    files = [file.absolute() for file in options.answers]
    if options.exercise == "all":
        return grade(files, options.submit)
    if len(files) > 1 or options.submit:
        parser.error("several files, and --submit, need `all` instead of a number")
    ((code, line),) = judged([(int(options.exercise), str(files[0]))])
    print(line, file=sys.stderr if code == UsageError.exit_code else sys.stdout)
    return code


def grade(files: Sequence[Path], submission: Path | None = None) -> int:
    """Checks all exercises of each file, prints the verdicts and points, and writes them to `submission`. Returns 0 if
    everything is right, else 1."""
    reports: list[dict[str, Any]] = []
    for file in files:
        results: list[dict[str, Any]] = []
        for number, check in enumerate(CHECKS, start=1):
            code, line = 1, "not answered"
            if _is_answered(file, _name(check)):
                ((code, line),) = judged([(number, str(file))])
            results.append({"exercise": number, "points": 0 if code else POINTS[number], "line": line})
            print(f"{number:>2} {_name(check):<24} {results[-1]['points']} of {POINTS[number]}  {line}", flush=True)
        points = sum(result["points"] for result in results)
        print(f"{file.name}: {points} of {sum(POINTS.values())} points\n")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        reports.append({"file": file.name, "sha256": digest, "points": points, "results": results})
    if submission:
        made_with = {"python": platform.python_version(), "torch": str(torch.__version__), "system": platform.system()}
        content = {"format": 1, "of": sum(POINTS.values()), **made_with, "submissions": reports}
        submission.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(report["points"] < sum(POINTS.values()) for report in reports))


def _name(check: Callable[..., str]) -> str:
    return "Broken" if check is broken else check.__name__


def judged(jobs: Sequence[Job], seconds: float | None = None, patience: timedelta = PATIENCE) -> list[Verdict]:
    """Runs all jobs in the same new processes, as many as the first needs; the first to find a mistake decides. Raises
    RunError: the ranks do not meet."""
    check = CHECKS[jobs[0][0] - 1]
    ranks, verdicts = 2 if check in ON_TWO_RANKS else 1, []
    if seconds is None:
        seconds = 900 if check is broken else SECONDS  # its trainings take half a minute on two free cores
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, context) as pool:
        given = ranks, (Path(folder) / "ranks").as_uri(), jobs, patience
        try:
            for rank in as_completed([pool.submit(_rank, rank, *given) for rank in range(ranks)], seconds):
                verdicts.append(rank.result())
                if all(code for code, _ in verdicts[-1]):
                    break
        except (TimeoutError, BrokenProcessPool):
            line = f"wrong: no result within {seconds:g} s: an endless loop, or a collective of one rank?"
            return [(1, line)] * len(jobs)
        finally:
            for process in multiprocessing.active_children():
                process.kill()
    return [next((one for one in of_job if one[0]), of_job[0]) for of_job in zip(*verdicts, strict=True)]


def _rank(rank: int, ranks: int, place: str, jobs: Sequence[Job], patience: timedelta) -> list[Verdict]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    torch.set_num_threads(1)
    if ranks > 1:
        try:
            distributed.init_process_group("gloo", place, patience, ranks, rank)
        except Exception as error:  # of torch's classes, some of which cannot be passed on
            raise RunError(f"the ranks have not met: {short(error, 300)}") from None
    return [judge(exercise, file) for exercise, file in jobs]


def judge(exercise: int, file: str) -> Verdict:
    """Returns exit code and line of an answer, run in this process."""
    check = CHECKS[exercise - 1]
    name = _name(check)
    try:
        if sys.platform == "win32" and check in NOT_ON_WINDOWS:
            raise UsageError(f"exercise {exercise} needs Linux or macOS; on Windows use WSL")
        answer = user_code.load(f"{file}:{name}", f"exercise {exercise}:")
        if _is_open(Path(file), name):
            raise UsageError(
                f"exercise {exercise}: {name} in {Path(file).name} is still `...`: write your answer there"
            )
        return 0, f"right: {check(answer)}"
    except UsageError as error:
        return error.exit_code, str(error)
    except (Exception, SystemExit) as error:
        line = "" if isinstance(error, Wrong) else f"{user_code.where(error)}{type(error).__name__}: "
        return 1, f"wrong: {line}{short(error, 400)}"


def _is_answered(file: Path, name: str) -> bool:
    source = file.read_text(errors="replace")
    try:
        return name in source and not _is_open(file, name)
    except SyntaxError:
        return True  # the verdict then names the line


def _is_open(file: Path, name: str) -> bool:
    """Returns whether the function or class of a file has nothing but `...` or a docstring in its body."""
    parts = [part for part in ast.parse(file.read_bytes()).body if isinstance(part, ast.FunctionDef | ast.ClassDef)]
    body = next((part.body for part in parts if part.name == name), [])
    return bool(body) and all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in body)


def linear(answer: Callable[..., tuple[Tensor, ...]]) -> str:
    """Exercise 1: compares value and gradients of a linear layer with autograd's."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((5, 4), (3, 4), (3,))]  # x, weight, bias
    upstream = torch.randn(5, 3)
    y = nn.functional.linear(*inputs)
    of_x, of_weight, of_bias = torch.autograd.grad(y, inputs, upstream)
    want = {
        "y": (y.detach(), "each row of x times the transposed weight, plus the bias"),
        "the gradient of x": (of_x, "upstream times the weight: the sum over the outputs"),
        "the gradient of weight": (of_weight, "the transposed upstream times x: the sum over the rows"),
        "the gradient of bias": (of_bias, "the bias is in every row: sum over them, without a mean"),
    }
    _all_same(answer(*(tensor.detach().clone() for tensor in inputs), upstream), want)
    return "value and three gradients are autograd's"


def relu(answer: Callable[..., tuple[Tensor, ...]]) -> str:
    """Exercise 2: compares value and gradient of a ReLU with autograd's."""
    torch.manual_seed(0)
    x, upstream = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    y = x.relu()
    (of_x,) = torch.autograd.grad(y, [x], upstream)
    want = {
        "y": (y.detach(), "the larger of x and 0"),
        "the gradient of x": (of_x, "upstream where x is positive, else 0"),
    }
    _all_same(answer(x.detach().clone(), upstream), want)
    return "value and gradient are autograd's"


def max_pool(answer: Callable[..., tuple[Tensor, ...]]) -> str:
    """Exercise 3: compares the maxima of 2 x 2 windows, and their gradient, with autograd's."""
    images, _ = _images(2)
    leaf, upstream = images.clone().requires_grad_(), torch.randn(2, 3, 16, 16)
    y = nn.functional.max_pool2d(leaf, 2)
    (of_images,) = torch.autograd.grad(y, [leaf], upstream)
    expected = {
        "y": (y.detach(), "the largest of each 2 x 2 window, for each image and channel"),
        "the gradient of images": (of_images, "upstream where the window's largest value was, else 0"),
    }
    _all_same(answer(images.clone(), upstream), expected)
    return "the maxima and their gradient are autograd's"


def convolution_size(answer: Callable[..., tuple[int, int]]) -> str:
    """Exercise 4: compares the side of the output and the number of parameters with a layer of torch."""
    sizes = ((32, 3, 6, 5, 1, 0), (32, 3, 64, 3, 1, 1), (32, 64, 128, 3, 2, 1), (224, 3, 32, 3, 2, 1))
    for side, channels, filters, kernel, stride, padding in sizes:
        with torch.device("meta"):
            layer = nn.Conv2d(channels, filters, kernel, stride, padding)
            output = layer(torch.empty(1, channels, side, side)).shape[-1]
        want = output, sum(parameter.numel() for parameter in layer.parameters())
        got = answer(side, channels, filters, kernel, stride, padding)
        if got != want:
            raise Wrong(
                f"side {side}, {channels} channels, {filters} filters of {kernel} x {kernel}, stride {stride}, padding "
                f"{padding}: {got!r}, not {want}: positions are rounded down, and each filter has a bias"
            )
    return f"sides and parameters of {len(sizes)} convolutions are torch's"


def convolution_gradients(answer: Callable[..., tuple[Tensor, ...]]) -> str:
    """Exercise 5: compares the gradients of a convolution with autograd's."""
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 7, 7, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    upstream = torch.randn(2, 4, 5, 5)
    of_images, of_weight = torch.autograd.grad(nn.functional.conv2d(*inputs), inputs, upstream)
    want = {
        "the gradient of images": (of_images, "each output position adds upstream times the filter to its window"),
        "the gradient of weight": (of_weight, "each output position adds upstream times its window, over all images"),
    }
    _all_same(answer(*(tensor.detach().clone() for tensor in inputs), upstream), want)
    return "both gradients are autograd's"


def cross_entropy_gradient(answer: Callable[..., Tensor]) -> str:
    """Exercise 6: compares the gradient of the mean cross-entropy with autograd's, for large logits too."""
    for scale in (1, 1000):
        torch.manual_seed(0)
        logits, labels = scale * torch.randn(6, 10), torch.randint(10, (6,))
        leaf = logits.clone().requires_grad_()
        (want,) = torch.autograd.grad(nn.functional.cross_entropy(leaf, labels), [leaf])
        hint = "softmax minus one-hot, divided by the number of images; subtract each row's maximum before exp"
        _same(f"the gradient of logits of size {scale:,}", answer(logits, labels), want, hint)
    return "the gradient is autograd's, for logits of size 1,000 too"


def training_step(answer: Callable[..., Tensor]) -> str:
    """Exercise 7: trains the tutorial's Net with the answer as training_step, and with CIFARModule's own."""
    from cifar_module import CIFARModule
    from cifar_zero.config import command_line

    config, batches = command_line.parse(["--accelerator", "cpu"]), DataLoader(TensorDataset(*_images(32)), 4)
    answered = type("Answered", (CIFARModule,), {"training_step": answer})
    got, want = (_losses(module(config, 10), batches) for module in (answered, CIFARModule))
    for step in range(8):
        hint = "the mean cross-entropy of the scores, which applies the softmax itself; only Lightning updates weights"
        _same(f"the loss of step {step + 1}", got[step], want[step], hint, tolerance=0)
    return "the losses of 8 steps are CIFARModule's, bit for bit"


def accumulate(answer: Callable[..., None]) -> str:
    """Exercise 8: compares the gradients after three micro-batches with those of the whole batch."""
    (images, labels), model, seen = _images(20), _net(), []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    answer(model, [*zip(images.split(8), labels.split(8), strict=True)])
    if seen != [8, 8, 4]:
        raise Wrong(f"the model saw {seen} images at a time, not [8, 8, 4]: one forward pass for each micro-batch")
    hint = "each image counts 1/20: weigh the mean loss of a micro-batch by its share of the images"
    _same_gradients("", model, images, labels, hint)
    return "micro-batches of 8, 8 and 4 images leave the gradient of the batch of 20"


def average_gradients(answer: Callable[..., None]) -> str:
    """Exercise 9: compares the gradients after the average over two ranks with those of the whole batch."""
    (images, labels), model, rank = _images(16), _net(), distributed.get_rank()
    for parameter, own in zip(model.parameters(), _gradients(model, images[rank::2], labels[rank::2]), strict=True):
        parameter.grad = own
    answer(model)
    hint = "sum each gradient over the ranks, divide by their number, leave the result in .grad"
    _same_gradients(f"rank {rank}: ", model, images, labels, hint)
    return "both ranks have the gradient of the whole batch"


def zero_1_step(answer: Callable[..., Tensor]) -> str:
    """Exercise 10: compares four steps of ZeRO 1 on two ranks with those of torch's SGD on the whole batch."""
    rank, model = distributed.get_rank(), _net()
    weights = parameters_to_vector(model.parameters()).detach()
    plain, momentum = nn.Parameter(weights.clone()), torch.zeros(len(weights) // 2)
    optimizer = torch.optim.SGD([plain], lr=0.1, momentum=0.9)
    for step in range(1, 5):
        images, labels = _images(16, seed=step)
        vector_to_parameters(plain.detach().clone(), model.parameters())
        plain.grad = parameters_to_vector(_gradients(model, images, labels))
        optimizer.step()
        vector_to_parameters(weights.clone(), model.parameters())
        own = parameters_to_vector(_gradients(model, images[rank::2], labels[rank::2]))
        weights = answer(weights.clone(), own, momentum, 0.1, 0.9)
        want = optimizer.state[plain]["momentum_buffer"].chunk(2)[rank]
        hint = "0.9 times itself plus the averaged gradient, in place"
        _same(f"rank {rank}, step {step}: the momentum", momentum, want, hint)
        hint = "lr times the momentum less in each half, both halves in the order of the ranks"
        _same(f"rank {rank}, step {step}: the result", weights, plain.detach(), hint)
    return f"four steps are plain torch's, with {len(momentum):,} of {len(weights):,} momenta on each rank"


def clip_shard(answer: Callable[..., Tensor]) -> str:
    """Exercise 11: compares shards of 7 and 5 elements with the parts of what torch clips in one process."""
    rank = distributed.get_rank()
    for max_norm in (1.0, 100.0):
        whole = nn.Parameter(torch.zeros(12))
        whole.grad = torch.linspace(-3, 5, 12)
        got = answer(whole.grad.split([7, 5])[rank].clone(), max_norm)
        norm = float(clip_grad_norm_([whole], max_norm))
        hint = f"the global norm is {norm:.4g}: the root of the sum of all squares on all ranks; cut only a larger one"
        _same(f"rank {rank}: the shard clipped at {max_norm:g}", got, whole.grad.split([7, 5])[rank], hint)
    return "the shards are those of the clipped whole, and small gradients stay as they are"


def bytes_per_rank(answer: Callable[..., float]) -> str:
    """Exercise 12: compares the bytes with those of the ZeRO paper (Rajbhandari et al. 2020, section 5)."""
    sharded = ("nothing", "the optimizer's 12 bytes", "the gradient too", "the parameter too")
    for parameters, stage, ranks in itertools.product((10**9, 7 * 10**9), range(4), (1, 8, 64)):
        want = parameters * (16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks)[stage]
        got = answer(stage, parameters, ranks)
        if not abs(got - want) <= 1e-6 * want:
            raise Wrong(
                f"stage {stage}, {parameters:,} parameters, {ranks} ranks: {got!r}, not {want}, {want / parameters:g} "
                f"bytes per parameter: parameter 2, gradient 2, optimizer 12; this stage shards {sharded[stage]}"
            )
    return "all 24 sizes are those of the ZeRO paper"


def batch_for_zero(answer: Callable[[], int]) -> str:
    """Exercise 13: compares the global batch with the largest micro-batches that fit by cifar-zero plan."""
    flags = "--model vit_base --optimizer adamw --precision 32-true --devices 8 --device_memory 16GB --json"
    plan = subprocess.check_output([sys.executable, "-m", "cifar_zero", "plan", *flags.split()], cwd=ROOT)
    most = {need["strategy"]: need["most_images"] for need in json.loads(plan)["strategies"]}
    batch = answer()
    ddp, zero = ("fits" if batch / 8 <= most[name] else "does not fit" for name in ("ddp", "deepspeed_stage_2"))
    said = f"{batch:,} images are {batch / 8:g} on each rank: cifar-zero plan says that DDP {ddp}, ZeRO 2 {zero}"
    if batch / 8 != most["ddp"] + 1:
        raise Wrong(f"{said}: try a {'larger' if ddp == 'fits' else 'smaller'} batch")
    return said


def zero_3_step(answer: Callable[..., Tensor]) -> str:
    """Exercise 15: compares four steps of ZeRO 3 on two ranks with those of a plain model on the whole batch. No two
    layers may be gathered at the same time."""
    rank, widths = distributed.get_rank(), (12, 16, 16, 10)
    torch.manual_seed(0)
    shapes = [(outputs, inputs) for inputs, outputs in itertools.pairwise(widths)]
    plain = [nn.Parameter(torch.randn(shape) / shape[1] ** 0.5) for shape in shapes]
    shards = [weight.detach().flatten().chunk(2)[rank].clone() for weight in plain]
    optimizer = torch.optim.SGD(plain, lr=0.1)
    for step in range(1, 5):
        x, labels = torch.randn(16, widths[0]), torch.randint(10, (16,))
        loss = _mlp_loss(plain, x[rank::2], labels[rank::2]).detach()
        optimizer.zero_grad()
        _mlp_loss(plain, x, labels).backward()
        optimizer.step()
        where = f"rank {rank}, step {step}: "
        with _Gathers(where) as gathers, torch.no_grad():
            answered = answer(shards, shapes, x[rank::2].clone(), labels[rank::2].clone(), 0.1)
        _same(f"{where}the loss", answered, loss, "the mean cross-entropy of this rank's images, before the update")
        for layer, (shard, weight) in enumerate(zip(shards, plain, strict=True), start=1):
            hint = "lr times the mean gradient over the ranks less, in place; gather W before you update its shard"
            _same(f"{where}the shard of layer {layer}", shard, weight.detach().flatten().chunk(2)[rank], hint)
    return f"four steps are plain torch's, with {gathers.count} gathers per step and one layer gathered at a time"


def _mlp_loss(weights: Sequence[Tensor], x: Tensor, labels: Tensor) -> Tensor:
    for weight in weights[:-1]:
        x = (x @ weight.T).relu()
    return nn.functional.cross_entropy(x @ weights[-1].T, labels)


class _Gathers:
    """Counts the calls of all_gather_into_tensor. A gathered tensor must be freed before the next one is gathered."""

    def __init__(self, where: str):
        self.where, self.count = where, 0
        self.last: StorageWeakRef | None = None
        self.original = distributed.all_gather_into_tensor

    def __enter__(self) -> "_Gathers":
        distributed.all_gather_into_tensor = self._gather
        return self

    def __exit__(self, *_: object) -> None:
        distributed.all_gather_into_tensor = self.original

    def _gather(self, output: Tensor, *args: Any, **options: Any) -> Any:
        until = time.monotonic() + 2  # gloo's threads may hold a tensor for a moment longer
        while self.last is not None and not self.last.expired():
            if time.monotonic() > until:
                hint = "`del` it after use"
                raise Wrong(f"{self.where}a gathered layer is still in memory at gather {self.count + 1}: {hint}")
            time.sleep(0.001)
        self.last, self.count = StorageWeakRef(output.untyped_storage()), self.count + 1
        return self.original(output, *args, **options)


def bytes_sent(answer: Callable[..., float]) -> str:
    """Exercise 16: compares the bytes that a rank sends in a step with those of the ZeRO paper (section 7)."""
    counts = (2, 2, 2, 3)
    sends = (
        "an all-reduce of the gradients",
        *["a reduce-scatter of the gradients and an all-gather of the parameters"] * 2,
        "two all-gathers of the parameters and a reduce-scatter of the gradients",
    )
    for parameters, stage, ranks in itertools.product((62_006, 7 * 10**9), range(4), (1, 2, 64)):
        expected = 2 * counts[stage] * parameters * (ranks - 1) / ranks
        answered = answer(stage, parameters, ranks)
        if not abs(answered - expected) <= 1e-6 * expected:
            raise Wrong(
                f"stage {stage}, {parameters:,} parameters, {ranks} ranks: {answered!r}, not {expected:g}: "
                f"{sends[stage]}; in a ring, an all-reduce costs as much as the other two together"
            )
    return "all 24 sizes are those of the ZeRO paper"


def lora_cost(answer: Callable[..., tuple[int, int, float]]) -> str:
    """Exercise 14: compares the size of an adapter, its training state and its FLOPs with a layer of this program."""
    from cifar_zero.build_model import LoRALinear
    from cifar_zero.config.recipe import LoRAConfig

    for inputs, outputs, rank in ((192, 576, 8), (400, 120, 4), (4096, 4096, 32)):
        with torch.device("meta"):
            layer = LoRALinear(nn.Linear(inputs, outputs), LoRAConfig(rank=rank))
        trained = layer.lora_a.numel() + layer.lora_b.numel()
        expected = trained, 12 * trained, trained / (inputs * outputs)
        answered = answer(inputs, outputs, rank)
        if not isinstance(answered, tuple) or tuple(f"{value:.6g}" for value in answered) != tuple(
            f"{value:.6g}" for value in expected
        ):
            raise Wrong(
                f"{inputs} inputs, {outputs} outputs, rank {rank}: {answered!r}, not {expected}: A is rank x inputs, B "
                "outputs x rank; gradient and two moments are 4 bytes each; a product costs 2 FLOPs for each weight"
            )
    return "sizes and FLOPs are those of this program's adapters"


def broken(answer: Any) -> str:
    """Exercise 17: lets `stepcheck module` look for the first step and tensor that ZeRO 2 changes."""
    from stepcheck.testing import assert_agrees

    losses = _losses(answer())
    if not losses[-1] < losses[0]:
        raise Wrong(f"it does not learn: the loss is {losses[0]:.3g} at step 1 and {losses[-1]:.3g} at step 8")
    try:
        assert_agrees(answer, strategies=["deepspeed_stage_2"], devices=2, steps=8)
    except AssertionError as found:
        if "different: step" in str(found):
            return short(found, 300)
        raise Wrong(short(found, 300)) from found
    raise Wrong("on two ranks ZeRO 2 trains it as DDP does, for 8 steps")


def _losses(module: Any, batches: DataLoader | None = None) -> list[Tensor]:
    """Returns the losses of 8 steps in a Trainer on the CPU, without `batches` on those of the module."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import LambdaCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    losses: list[Any] = []
    record = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: losses.append(outputs.get("loss")))
    Trainer(barebones=True, accelerator="cpu", max_steps=8, callbacks=record).fit(module, batches)
    return losses


def _images(number: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(number, 3, 32, 32), torch.randint(10, (number,))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return models.build("net", 10)


def _gradients(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(nn.functional.cross_entropy(model(images), labels), [*model.parameters()])]


def _same_gradients(where: str, model: nn.Module, images: Tensor, labels: Tensor, hint: str) -> None:
    for (name, parameter), want in zip(model.named_parameters(), _gradients(_net(), images, labels), strict=True):
        _same(f"{where}the gradient of {name}", parameter.grad, want, hint)


def _all_same(got: Any, want: Mapping[str, tuple[Tensor, str]]) -> None:
    """Raises Wrong unless `got` is a tuple with the tensors of `want`, each of which has a name and a hint."""
    if not isinstance(got, tuple) or len(got) != len(want):
        number = f"{len(got)} values" if isinstance(got, tuple) else type(got).__name__
        raise Wrong(f"the result is {number}, not a tuple of {len(want)}: {', '.join(want)}")
    for value, (name, (tensor, hint)) in zip(got, want.items(), strict=True):
        _same(name, value, tensor, hint)


def _same(what: str, got: Any, want: Tensor, hint: str, tolerance: float = TOLERANCE) -> None:
    """Raises Wrong unless two tensors have the same shape and dtype, and differ relatively by at most `tolerance`."""
    kinds = [f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__ for x in (got, want)]
    if kinds[0] != kinds[1]:
        raise Wrong(f"{what} is {kinds[0]}, not {kinds[1]}: {hint}")
    off = float((got - want).norm() / want.norm())
    if off <= tolerance:
        return
    factor = float((got * want).sum() / want.square().sum())
    scaled = float((got - factor * want).norm()) <= TOLERANCE * float(got.norm()) and want.dim()
    values = f"off by {100 * off:.3g} %" if want.dim() else f"{float(got):.7g}, not {float(want):.7g}"
    raise Wrong(f"{what} is {values}{f', {factor:.3g} times the right one' if scaled else ''}: {hint}")


CHECKS: list[Callable[..., str]] = [
    *(linear, relu, max_pool, convolution_size, convolution_gradients, cross_entropy_gradient),
    *(training_step, accumulate, average_gradients, zero_1_step, clip_shard),
    *(bytes_per_rank, batch_for_zero, lora_cost, zero_3_step, bytes_sent, broken),
]
"""The checks of exercises 1 to 17: each returns what is right, or raises Wrong. An answer has the name of its check."""
ON_TWO_RANKS = (average_gradients, zero_1_step, clip_shard, zero_3_step)
NOT_ON_WINDOWS = (training_step, batch_for_zero, broken)
"""Checks that import modules of this program which need Linux or macOS."""
POINTS = dict.fromkeys(range(1, 18), 1) | {5: 2, 10: 2, 15: 4, 17: 2}

if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunError as error:
        sys.exit(str(error))
