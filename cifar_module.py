"""The LightningModule: a model with its loss, optimizer, learning-rate schedule and metrics."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.optim.lr_scheduler import LRScheduler

from cifar_zero import build_model
from cifar_zero.checkpoints.weights import load_full_weights
from cifar_zero.config.recipe import Views
from cifar_zero.config.settings import Settings
from cifar_zero.core.errors import UsageError
from cifar_zero.data.augment import memory_format, normalize
from cifar_zero.models.activation_checkpointing import checkpoint_blocks
from cifar_zero.models.moe import Gate, gates
from cifar_zero.optimizers import OPTIMIZERS
from cifar_zero.optimizers.groups import keep_own_options, match_strides, parameter_groups
from cifar_zero.schedules import SCHEDULES, Constant, Schedule, with_total_steps
from cifar_zero.strategies import hooks_of
from cifar_zero.training.metrics import SplitMetrics, loss


class CIFARModule(LightningModule):
    """Trains a model with the loss of --loss, and computes its metrics on validation and test images.

    A batch is a tuple (images, labels). Images (N, 3, H, W) are uint8, or floating-point and already normalised. Labels
    are int64 (N,). An image with the label `dataset.IGNORED` counts in neither loss nor metrics. In training, labels
    may also be the share of each class in each image, float (N, classes).

    Args:
        settings: The options of the run.
        num_classes: Width of the model's output.
        weights: Full tensors from which training starts, keyed by the model's own names. Others are initialised.
    """

    def __init__(self, settings: Settings, num_classes: int, weights: Mapping[str, Tensor] | None = None):
        super().__init__()
        self.settings = settings
        self.num_classes = num_classes
        self.optimizer_options = OPTIMIZERS[settings.recipe.optimizer.name](**settings.recipe.optimizer.options)
        self.schedule = SCHEDULES[settings.recipe.schedule.name](**settings.recipe.schedule.options)
        self.inputs = settings.data.inputs
        self._weights = weights or {}
        self.net: nn.Module | None = None
        self.gates: tuple[Gate, ...] = ()  # gates of the mixture-of-experts layers
        self.val_metrics = SplitMetrics(num_classes, settings.recipe.loss)
        self.test_metrics = SplitMetrics(num_classes, settings.recipe.loss, curves=True)

    def configure_model(self) -> None:
        """Builds the model, loads the weights from which it starts, and applies --activation_checkpointing, --compile
        and --cuda_graphs. Later calls do nothing.

        Lightning calls this method in the strategy's context, so that ZeRO 3 shards each layer as soon as it is
        created. The seed is set just before, so that the model starts from the same weights under every strategy and
        world size.
        """
        if self.net is not None:
            return
        settings = self.settings
        torch.manual_seed(settings.recipe.seed)
        self.net = build_model.create_model(settings.recipe, self.num_classes)
        strategy = None if self._trainer is None else self._trainer.strategy
        load_full_weights(self.net, {**self.starting_weights(), **self._weights}, hooks_of(strategy).write)
        self._weights = {}
        self.gates = gates(self.net)
        if strategy is not None:
            convert_to_channels_last(self.net, strategy)
        if settings.placement.activation_checkpointing:
            checkpoint_blocks(self.net)
        if settings.placement.compile or settings.placement.cuda_graphs:
            # dynamic=False, because there are only two batch sizes: the micro-batch and the evaluation batch.
            self.net.compile(dynamic=False, mode="reduce-overhead" if settings.placement.cuda_graphs else None)

    def starting_weights(self) -> Mapping[str, Tensor]:
        """Returns the weights, by name, that the model computes from training images before training starts: the
        whitening filters of SpeedNet. For other models, or without a data module, the mapping is empty."""
        compute = getattr(self.net, "starting_weights", None)
        datamodule: Any = getattr(self._trainer, "datamodule", None)
        if compute is None or datamodule is None:
            return {}
        # The images go to the rank's device, because the module may not have been moved there yet.
        images = datamodule.sample(1000)  # 1,000 images give 961,000 patches for 78 covariances
        images = images.to(self.trainer.strategy.root_device)
        return compute(normalize(images, self.inputs))

    def on_fit_start(self) -> None:
        """Raises UsageError if --trainer.limit_val_batches or limit_test_batches is a share of less than one batch.
        Lightning would raise an error only when it validates or tests."""
        if self.settings.recipe.only_measures:
            return
        trainer: Any = self.trainer
        for split in ("val", "test"):
            limit = getattr(trainer, f"limit_{split}_batches")
            if not 0 < limit < 1:
                continue
            batches = len(getattr(trainer.datamodule, f"{split}_dataloader")())
            if batches and int(limit * batches) == 0:
                option = "overfit_batches" if trainer.overfit_batches else f"limit_{split}_batches"
                raise UsageError(
                    f"--trainer.{option} {limit:g} is less than one batch ({batches} in all): "
                    "use a number of batches, such as 1, or 0 for none"
                )

    def on_train_start(self) -> None:
        """Finds the gates of the mixture-of-experts layers again, because the strategy may have replaced them. If the
        model has frozen parameters, freezes the running statistics of each batch norm without a trained parameter."""
        assert self.net is not None
        self.gates = gates(self.net)
        build_model.freeze_statistics(self.net)

    def forward(self, images: Tensor) -> Tensor:
        """Returns class scores (N, classes) for images (N, 3, H, W), which are uint8 or already normalised.

        Step methods such as `training_step` call `self.forward` instead of `self`, because Lightning has already called
        the module. A nested call would run DeepSpeed's module hooks twice, and ZeRO 3 could not record the order of the
        layers.
        """
        assert self.net is not None
        images = normalize(images, self.inputs, next(self.net.parameters()).dtype)
        return self.net(images.contiguous(memory_format=memory_format(images.device)))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss to minimise, a float32 scalar: the mean loss of a micro-batch plus the weighted
        load-balancing losses of the mixture-of-experts layers."""
        images, labels = batch
        with save_on_cpu(pin_memory=True) if self.settings.placement.activation_offload else nullcontext():
            total = loss(
                self.settings.recipe.loss, self.forward(images).float(), labels, self.settings.recipe.label_smoothing
            )
        for gate in self.gates:
            if gate.options.load_balance and gate.routing is not None:
                total = total + gate.options.load_balance * gate.routing.load_balance_loss
        return total

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(self.val_metrics, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(self.test_metrics, batch, self.settings.recipe.tta)

    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val", self.val_metrics)

    def on_test_epoch_end(self) -> None:
        """Logs the test metrics. `test_metrics` keeps its values until the next test."""
        self._log_metrics("test", self.test_metrics)

    def on_test_epoch_start(self) -> None:
        self.test_metrics.reset(self.device, hooks_of(self.trainer.strategy).data_group())

    def on_validation_epoch_start(self) -> None:
        self.val_metrics.reset(self.device, hooks_of(self.trainer.strategy).data_group())

    def configure_optimizers(self) -> Any:
        """Returns the optimizer, in the implementation that the strategy needs, and unless the schedule is constant a
        learning-rate scheduler, which Lightning steps once per optimizer step."""
        strategy = self.trainer.strategy
        hooks = hooks_of(strategy)
        groups = parameter_groups(self.optimizer_options, dict(self.named_parameters()), hooks.shape)
        groups = hooks.split_groups(self, groups)
        clips = bool(self.trainer.gradient_clip_val)
        implementation = hooks.optimizer_implementation(strategy.root_device.type, clips)
        optimizer = self.optimizer_options.build(groups, implementation)
        optimizer.register_load_state_dict_pre_hook(keep_own_options)
        optimizer.register_load_state_dict_post_hook(match_strides)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if isinstance(self.schedule, Constant):
            return optimizer
        self.schedule = with_total_steps(self.schedule, lambda: self.trainer.estimated_stepping_batches)
        scheduler = StepSchedule(optimizer, self.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def resume_rates(self, scheduled: bool) -> None:
        """Sets the learning rates for the step at which a run resumes. They may differ from those in the checkpoint,
        because the schedule or the length of the run may have changed. If the schedule was constant and still is, the
        rates of the checkpoint stay, because a callback may have changed them. `scheduled` says whether the run that
        wrote the checkpoint had another schedule than constant."""
        groups = self.trainer.optimizers[0].param_groups
        rates = self._rates if scheduled else [group["lr"] for group in groups]
        for config in self.trainer.lr_scheduler_configs:
            schedule: Any = config.scheduler
            schedule.last_epoch = schedule.last_epoch or self.trainer.global_step  # 0 if the checkpoint had no schedule
            rates = schedule._last_lr = schedule.get_lr()  # a step check reads _last_lr
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _evaluate(self, metrics: SplitMetrics, batch: tuple[Tensor, Tensor], tta: Views = "none") -> None:
        images, labels = batch
        metrics.update(averaged_scores(self.forward, normalize(images, self.inputs), tta), labels)

    def _log_metrics(self, split: str, metrics: SplitMetrics) -> None:
        # The values are the same on every rank (torchmetrics has summed the counts); sync_dist silences a warning.
        class_names = self.trainer.datamodule.classes  # pyright: ignore[reportAttributeAccessIssue]
        # Lightning uses a value named step as the x-axis. It counts optimizer steps, as in the training curves.
        step = float(self.trainer.global_step)
        self.log_dict({**metrics.named(split, class_names), "step": step}, sync_dist=True)


def averaged_scores(model: Callable[[Tensor], Tensor], images: Tensor, views: Views) -> Tensor:
    """Returns class scores (N, classes) in float32, averaged over several views of normalised images (N, 3, H, W). The
    model runs once per view.

    With `views` none, the only view is the image itself. With mirror, its mirror image is the second view, with equal
    weight. With mirror_translate, the image and its mirror image have weight 1/4 each, and four shifted views have
    weight 1/8 each: both images shifted by one pixel up and left, and by one pixel down and right, padded by
    reflection. This follows airbench (Jordan 2024, arXiv 2404.00498; github.com/KellerJordan/cifar10-airbench,
    `infer`).
    """
    if views == "none":
        return model(images).float()
    scores = _mirrored(model, images)
    if views == "mirror":
        return scores
    height, width = images.shape[2:]
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    moved = _mirrored(model, padded[:, :, :height, :width]) + _mirrored(model, padded[:, :, 2:, 2:])
    return 0.5 * scores + 0.25 * moved


def _mirrored(model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    return 0.5 * model(images).float() + 0.5 * model(images.flip(3)).float()


def convert_to_channels_last(net: nn.Module, strategy: Any) -> None:
    """Converts the convolution weights of `net`, in place, to the memory format of the images, so that no step has to.
    This is done only on a GPU, under strategies that neither shard nor flatten the weights. FSDP2 accepts only torch's
    default format."""
    if type(strategy) in (SingleDeviceStrategy, DDPStrategy) and strategy.root_device.type == "cuda":
        net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


class StepSchedule(LRScheduler):
    """A scheduler of torch that follows a `Schedule` of cifar_zero/schedules. Step it once per optimizer step."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule):
        self.schedule = schedule
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """Computes each rate from the count of steps and the group's initial rate, not from its current one."""
        return [self.schedule.rate(self.last_epoch, float(lr)) for lr in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Returns only the count of steps. The configuration has the formula of the schedule, and the strategy saves
        the parameter groups."""
        return {key: value for key, value in super().state_dict().items() if key in ("last_epoch", "_step_count")}
