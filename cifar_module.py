"""The LightningModule: a network of models/ with its loss, optimizer, learning-rate schedule and metrics."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.optim.lr_scheduler import LRScheduler

from cifar_zero import strategies
from cifar_zero.checkpoints.finetuning import network
from cifar_zero.checkpoints.finetuning.freeze import rest_statistics
from cifar_zero.checkpoints.finetuning.load import put
from cifar_zero.config.flags import Choice, LoRAConfig, Views
from cifar_zero.data.augment import memory_format, normalize
from cifar_zero.models.moe import Gate, gates
from cifar_zero.models.recomputation import checkpoint_blocks
from cifar_zero.optimizers import OPTIMIZERS, groups
from cifar_zero.optimizers.state import keep_own_options, lay_like_parameters
from cifar_zero.schedules import SCHEDULES, settled
from cifar_zero.schedules.base import Schedule
from cifar_zero.schedules.plain import Constant
from cifar_zero.training.metrics import CurveMetrics, SplitMetrics
from cifar_zero.training.test_time_augmentation import averaged_scores

STARTING_IMAGES = 1000
"""Training images from which a network computes weights that it starts with: 961,000 patches for 78 covariances."""


class CIFARModule(LightningModule):
    """Cross-entropy training of a network; its figures (metrics.py) on validation and test images.

    A batch is (images, labels): images uint8 (N, 3, H, W), or float in [-1, 1]; labels int64 (N,), where IGNORED counts
    nowhere, or in training each class's share, float (N, classes).

    Args:
        model: name and options of the network.
        optimizer: name and options of the optimizer.
        schedule: name and options of the learning-rate schedule.
        num_classes: width of the network's output.
        seed: of the initial weights.
        init: how they are drawn, see `models.initialization`.
        compile: whether the network runs through torch.compile.
        cuda_graphs: whether it does so as CUDA graphs.
        skip_nan: whether a micro-batch is left out whose loss is no number or infinite.
        label_smoothing: share of each training label that is spread over all classes (Szegedy et al. 2016).
        activation_checkpointing: whether the backward pass computes the activations of each block again.
        activation_offload: whether the activations wait for it in pinned memory of the CPU.
        trainable: patterns of the parameters that are trained; see `finetuning.freeze.freeze`.
        lora: the adapters.
        channels_last: whether the network gets its images so on a GPU too; see `sources.augment.memory_format`.
        tta: views of a test image whose scores are averaged, see `views.averaged_scores`.
        weights: to start from, by the plain network's names; what they lack is drawn.
    """

    def __init__(
        self,
        model: Choice,
        optimizer: Choice,
        schedule: Choice,
        num_classes: int,
        seed: int = 0,
        compile: bool = False,
        cuda_graphs: bool = False,
        skip_nan: bool = False,
        label_smoothing: float = 0.0,
        activation_checkpointing: bool = False,
        activation_offload: bool = False,
        init: str = "default",
        trainable: Sequence[str] = (),
        lora: LoRAConfig = network.NO_LORA,
        channels_last: bool = False,
        tta: Views = "none",
        weights: Mapping[str, Tensor] | None = None,
    ):
        super().__init__()
        self.model = model
        self.optimizer = OPTIMIZERS[optimizer.name](**optimizer.options)
        self.schedule = SCHEDULES[schedule.name](**schedule.options)
        self.num_classes = num_classes
        self.seed = seed
        self.init = init
        self.compiled = compile or cuda_graphs
        self.cuda_graphs = cuda_graphs
        self.skip_nan = skip_nan
        self.label_smoothing = label_smoothing
        self.activation_checkpointing = activation_checkpointing
        self.activation_offload = activation_offload
        self.trainable, self.lora = trainable, lora
        self.channels_last = channels_last
        self.tta: Views = tta
        self._weights = weights or {}
        self.skipped = 0
        """Micro-batches that were left out."""
        self.net: nn.Module | None = None
        self.gates: tuple[Gate, ...] = ()
        """Of the network's mixtures of experts, while it is trained."""
        self.val_metrics = SplitMetrics(num_classes)
        self.test_metrics = CurveMetrics(num_classes)

    def configure_model(self) -> None:
        """Builds the network where the strategy wants it; ZeRO-3 shards each layer as it is made.

        The seed is set here, so that every strategy and world size starts from the same weights.
        """
        if self.net is not None:
            return
        torch.manual_seed(self.seed)
        self.net = network.build(self.model, self.num_classes, self.trainable, self.lora, self.init, self.seed)
        put(self.net, {**self.starting_weights(), **self._weights})
        self._weights = {}
        if self.channels_last and self._trainer is not None:
            lay_channels_last(self.net, self._trainer.strategy)
        if self.activation_checkpointing:
            checkpoint_blocks(self.net)
        if self.compiled:
            # dynamic=False: a micro-batch has one size, an evaluation batch another, and both are known.
            self.net.compile(dynamic=False, mode="reduce-overhead" if self.cuda_graphs else None)

    def starting_weights(self) -> Mapping[str, Tensor]:
        """What the network computes from training images, where it does so and a training is to begin."""
        compute = getattr(self.net, "starting_weights", None)
        datamodule: Any = getattr(self._trainer, "datamodule", None)
        if compute is None or datamodule is None:
            return {}
        # On the device, where nothing of the module need be yet: its clock runs while they are computed.
        return compute(normalize(datamodule.sample(STARTING_IMAGES).to(self.trainer.strategy.root_device)))

    def on_fit_start(self) -> None:
        """Looks up what the strategy has made of the network."""
        assert self.net is not None
        self.gates = gates(self.net)

    def on_train_start(self) -> None:
        """Leaves the statistics of frozen batch norms as they are."""
        assert self.net is not None
        rest_statistics(self.net)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores (N, classes) of images (N, 3, H, W), uint8 or normalised.

        The steps call it by name, as Lightning has called the module itself already to come to them: called again, it
        would run DeepSpeed's hooks twice, and ZeRO-3 could not learn in which order the layers come.
        """
        assert self.net is not None
        images = normalize(images, next(self.net.parameters()).dtype)
        return self.net(images.contiguous(memory_format=memory_format(images.device, self.channels_last)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean cross-entropy of one micro-batch with its labels, or its shares of them, a scalar in float32; and the
        load-balancing losses of the mixtures of experts, each with its weight."""
        images, labels = batch
        buffers = [*self.buffers()] if self.skip_nan else []
        before = [buffer.clone() for buffer in buffers]
        loss = self._loss(images, labels)
        if not self.skip_nan or self._finite_on_all_ranks(loss):
            return loss
        self.skipped += 1
        # A grey micro-batch of no weight: each engine takes part in it as ever, and its gradient is 0.
        grey = torch.zeros_like(images, dtype=torch.float32)
        loss = 0 * self._loss(grey, labels)
        for buffer, value in zip(buffers, before, strict=True):  # a batch norm has counted both
            buffer.data.copy_(value)
        return loss

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=True) if self.activation_offload else nullcontext():
            loss = F.cross_entropy(self.forward(images).float(), labels, label_smoothing=self.label_smoothing)
        for gate in self.gates:
            if gate.options.load_balance and gate.routing is not None:
                loss = loss + gate.options.load_balance * gate.routing.load_balance_loss
        return loss

    def _finite_on_all_ranks(self, loss: Tensor) -> bool:
        finite = loss.detach().isfinite().int()
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
        return bool(finite.item())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Counts one batch of validation images."""
        self._evaluate(self.val_metrics, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Counts one batch of test images; returns the class scores (N, classes) for the callbacks."""
        return self._evaluate(self.test_metrics, batch, self.tta)

    def on_validation_epoch_end(self) -> None:
        """Logs val/loss, val/acc and the other figures, overall and per class."""
        self._log_metrics("val", self.val_metrics)

    def on_test_epoch_end(self) -> None:
        """Logs test/loss, test/acc and the others; `test_metrics` stays readable until the next test."""
        self._log_metrics("test", self.test_metrics)

    def on_test_epoch_start(self) -> None:
        """Forgets the last test."""
        self.test_metrics.reset(self.device, strategies.data_group(self.trainer.strategy))

    def on_validation_epoch_start(self) -> None:
        """Forgets the last validation."""
        self.val_metrics.reset(self.device, strategies.data_group(self.trainer.strategy))

    def configure_optimizers(self) -> Any:
        """The optimizer in the strategy's implementation, and a schedule stepped with it unless it is constant."""
        strategy = self.trainer.strategy
        trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        parameters = groups.parameter_groups(self.optimizer, dict(self.named_parameters()))
        parameters = strategies.own(strategy).parameter_groups(self, parameters)
        clips = bool(self.trainer.gradient_clip_val)
        implementation = strategies.optimizer_implementation(strategy, strategy.root_device.type, clips)
        optimizer = self.optimizer.build(parameters, implementation)
        optimizer.register_load_state_dict_pre_hook(partial(keep_own_options, order=trained))
        optimizer.register_load_state_dict_post_hook(lay_like_parameters)
        if isinstance(self.schedule, Constant):
            return optimizer
        self.schedule = settled(self.schedule, lambda: self.trainer.estimated_stepping_batches)
        scheduler = StepSchedule(optimizer, self.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _evaluate(self, metrics: SplitMetrics, batch: tuple[Tensor, Tensor], tta: Views = "none") -> Tensor:
        images, labels = batch
        scores = averaged_scores(self.forward, images, tta)
        metrics.update(scores, labels)
        return scores

    def _log_metrics(self, split: str, metrics: SplitMetrics) -> None:
        # The values are the same on every rank (torchmetrics has added up the counts): sync_dist only says so.
        class_names = self.trainer.datamodule.classes  # pyright: ignore[reportAttributeAccessIssue]
        # Lightning takes a value named step for the curves' abscissa: optimizer steps done, as in the training curves.
        step = float(self.trainer.global_step)
        self.log_dict({**metrics.named(split, class_names), "step": step}, sync_dist=True)


def lay_channels_last(net: nn.Module, strategy: Any) -> None:
    """Filters as the images are, where a strategy leaves them whole on a GPU: else each step would turn them.

    Those of the others are cut, or laid end to end, and FSDP2 takes none but torch's own format.
    """
    whole = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) and not isinstance(strategy, DeepSpeedStrategy)
    if whole and strategy.root_device.type == "cuda":
        net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


class StepSchedule(LRScheduler):
    """A schedule of schedules/ as torch knows them, stepped once an optimizer step."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule):
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group at the step that comes next."""
        shares = [group.get("schedule_share", 1) for group in self.optimizer.param_groups]  # of optimizers/groups.py
        rates = zip(shares, self.base_lrs, strict=True)
        return [self.schedule.rate(self._at(share), float(base_lr)) for share, base_lr in rates]

    def _at(self, share: float) -> float:
        """The step of the whole schedule at which a group is that goes through it in a share of the training."""
        return self.last_epoch if share == 1 else self.last_epoch / share

    def state_dict(self) -> dict[str, Any]:
        """The step alone: the formula comes from the configuration, and the parameter groups from the strategy."""
        return {key: value for key, value in super().state_dict().items() if key in ("last_epoch", "_step_count")}
