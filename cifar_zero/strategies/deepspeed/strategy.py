"""Extends stepcheck's CPUDeepSpeedStrategy by what a training needs, such as checkpoints and experts."""

import importlib
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.utils import groups
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn import Module

from cifar_zero.checkpoints.io import AtomicCheckpointIO
from cifar_zero.checkpoints.zero_folder import TAG, layout_of
from cifar_zero.core import atomic
from cifar_zero.core.atomic import failure_of
from cifar_zero.core.console import say
from cifar_zero.core.errors import UsageError
from cifar_zero.strategies.deepspeed import experts
from cifar_zero.strategies.deepspeed.checkpoint import GuardedCheckpointEngine, restore, write_folder
from cifar_zero.strategies.deepspeed.hooks import EngineHooks, forget_second_copies
from stepcheck.lightning.strategy import CPUDeepSpeedStrategy
from stepcheck.replay.plain_copy import cast_batch_norm_weights

LINEAR = torch.nn.functional.linear
"""torch's own linear function. ZeRO 3 replaces it for all models of the process (DeepSpeed 0.19.8,
`_enable_mem_efficient_linear`). It is restored at the end of a fit or a test."""

ENGINE = "_deepspeed_engine"
"""Attribute of a module that holds the engine that trained it. A second fit destroys this engine first, to remove its
gradient hooks."""


class ZeROStrategy(CPUDeepSpeedStrategy):
    """Runs DeepSpeed's engine under Lightning, on GPUs or CPU ranks. Any LightningModule trains with it in a plain
    Trainer (docs/migrate.md). `options` are the options of Lightning's strategy.

    Unlike that strategy (2.6.6), it can `test` after `fit` (Lightning issue 15247), with the trained engine.
    Lightning's would start a second engine on the same model, after which `save_checkpoint` fails or silently leaves
    the optimizer out.
    """

    shards_while_building = False
    """Whether ZeRO 3 shards each layer as it is made. If not, the engine shards the whole model. Models of other
    packages need this, because they initialise their layers again at the end, which has no effect on weights that
    zero.Init has sharded."""

    operators: tuple[str, ...] = ()
    """DeepSpeed's operators that the run needs. They are compiled when they are first used."""

    checkpoint_io: Any  # an AtomicCheckpointIO after `setup_environment`

    _training_engine: Any = None  # None before the first fit

    group_names: list[list[str]]
    """The names of the parameters in each group of the optimizer that the module returned."""

    def __init__(self, stage: int = 2, overlap_comm: bool = False, **options: Any):
        super().__init__(stage=stage, overlap_comm=overlap_comm, **options)
        if "optimizer" in self.config:
            raise UsageError(
                "the DeepSpeed configuration has an optimizer: return it from configure_optimizers instead"
            )
        # The throughput timer waits for the device twice in each step (DeepSpeed 0.19.8, utils/timer.py).
        self.config.setdefault("timers", {"throughput": {"enabled": False}})

    def _configure_launcher(self) -> None:
        """Makes no launcher for a single rank, because Lightning (2.6.6) refuses its launcher in a notebook."""
        if self.num_processes * self.num_nodes > 1:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        """Replaces the checkpoint plugin of a plain Trainer, starts the process group, and loads the `operators`. Also
        switches off marks for NVIDIA's profiler and the compilation of Muon, which no run needs."""
        if not isinstance(self.checkpoint_io, AtomicCheckpointIO):
            self.checkpoint_io = AtomicCheckpointIO()
        deepspeed.utils.nvtx.enable_nvtx = False  # marks for NVIDIA's profiler, 260 in a step at ZeRO 3
        import_muon_uncompiled()
        super().setup_environment()
        for name in self.operators:  # loaded before Lightning's next call, which starts the clock of the fit
            if self.local_rank == 0:
                say(f"loading DeepSpeed's {name}; its first use on this computer compiles it in a minute or more")
            ALL_OPS[name].load(verbose=False)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Shards each layer as it is made at ZeRO 3, if `shards_while_building` is set. Under mixed precision the
        initial weights are drawn in float32, as under all other strategies, and `setup` casts the shards. zero.Init
        would draw other weights, in the low precision (DeepSpeed 0.19.8)."""
        self._init_config_if_needed()
        config = {**self.config}
        if self._casts_shards:
            for low in ("bf16", "fp16"):
                config.pop(low, None)
        # Resets the process group of zero_hpz_partition_size, which DeepSpeed (0.19.8, utils/groups.py) makes once in a
        # process.
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        where, shards = self.remote_device, self._builds_sharded
        with deepspeed.zero.Init(enabled=shards, remote_device=where, config_dict_or_path=config):
            yield

    def setup(self, trainer: Trainer) -> None:
        """Prepares the model for DeepSpeed and starts the engine: casts the shards of ZeRO 3 under mixed precision,
        makes the parameters contiguous, distributes experts over the ranks and keeps batch norms in float32. Raises
        UsageError for a parameter that DeepSpeed cannot train."""
        assert self.model is not None
        if self._casts_shards and self._training_engine is None:
            dtype = torch.bfloat16 if "bf16" in self.precision_plugin.precision else torch.float16
            parameters: Any = self.model.parameters()
            for parameter in parameters:
                parameter.data = parameter.data.to(dtype)
                parameter.ds_tensor.data = parameter.ds_tensor.data.to(dtype)
            forget_second_copies(self.model)
        self._make_contiguous(self.model)
        experts.distribute(self.model, self.global_rank)
        cast_batch_norm_weights(self.model)
        super().setup(trainer)

    def _make_contiguous(self, model: Module) -> None:
        """Makes each parameter contiguous, the only layout that DeepSpeed (0.19.8, `_broadcast_model`) can broadcast.
        Raises UsageError for a scalar, which it cannot broadcast either, and for two parameters that share memory,
        because DeepSpeed would silently separate them."""
        name_at: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            if not EngineHooks(self).shape(parameter):
                raise UsageError(f"{name} is a scalar, and DeepSpeed cannot broadcast it: give it the shape (1,)")
            other = name_at.setdefault(parameter.data_ptr(), name)
            if other != name and parameter.numel():  # empty where ZeRO 3 has sharded it already
                raise UsageError(
                    f"{other} and {name} share memory, and DeepSpeed would separate them: assign the same nn.Parameter "
                    "to both, or clone one"
                )
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()

    @property
    def _builds_sharded(self) -> bool:
        return self.zero_stage_3 and self.shards_while_building

    @property
    def _casts_shards(self) -> bool:
        return self._builds_sharded and "mixed" in self.precision_plugin.precision and self.remote_device != "nvme"

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the checkpoint folder completely or not at all, whereas DeepSpeed (0.19.8) writes in place. If any
        rank fails to write, the checkpoint plugin reports the error and the training continues."""
        final = Path(self.broadcast(filepath))
        if self.is_global_zero:
            failure_of(lambda: atomic.discard(atomic.staged(final)))
        self.barrier()
        progress = {key: checkpoint[key] for key in checkpoint if key not in ("state_dict", "optimizer_states")}
        failure = write_folder(self.deepspeed_engine, final, progress, self._layout)
        if self.is_global_zero:
            self.checkpoint_io.conclude(final, failure)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint that any strategy wrote on any number of ranks, and returns its content. Every rank must
        call it.

        If the model has an engine for training, and the checkpoint has this run's layout, each rank reads only its own
        shard, and the returned content lacks the weights and the optimizer's state. Any other checkpoint is assembled
        from all shards and then sharded again.
        """
        path = Path(checkpoint_path)
        trained = self._training_engine is not None
        if trained and path.is_dir() and layout_of(path / TAG, self.checkpoint_io.trust) == self._layout:
            engine: Any = self.deepspeed_engine
            module: Any = self.lightning_module
            engine.checkpoint_engine = GuardedCheckpointEngine(self.checkpoint_io.trust)
            # With the tag, the folder that was checked is loaded. Lightning (2.6.6) passes none, and DeepSpeed would
            # load the folder that the file `latest` names, which may be anywhere.
            _, progress = engine.load_checkpoint(
                str(path),
                tag=TAG,
                load_optimizer_states=module.trainer.state.fn == TrainerFn.FITTING,
                load_lr_scheduler_states=False,
                load_module_strict=module.strict_loading,
            )
            if hasattr(engine.optimizer, "clip_grad"):
                # DeepSpeed (0.19.8, `_load_global_state`) would clip at the limit of the run that saved the checkpoint.
                engine.optimizer.clip_grad = engine.gradient_clipping()
            return progress
        checkpoint = self.checkpoint_io.load_checkpoint(path)
        if trained:
            restore(self.deepspeed_engine, checkpoint, self.group_names)
        elif self.zero_stage_3:  # a test without a fit: DeepSpeed (0.19.8) cannot load the checkpoint
            self._restore_zero_state(checkpoint, strict=True)
        else:
            self._load_weights(checkpoint["state_dict"])
        return checkpoint

    def _load_weights(self, weights: dict[str, Any]) -> None:
        engine: Any = self.model
        names = {plain: name for name, plain in experts.plain_names_of(engine, engine.module.state_dict()).items()}
        own = {names.get(plain, plain): value for plain, value in weights.items()}
        engine.module.load_state_dict(own, strict=experts.ep_size(engine.module) == 1)  # other ranks have other experts

    @property
    def _layout(self) -> dict[str, Any]:
        """Everything that a shard depends on. Only a run with the same values can load a shard as it is."""
        assert self.lightning_module is not None
        return {
            "zero": self._zero,
            "ranks": self.world_size,
            "precision": str(self.precision_plugin.precision),
            "optimizer": EngineHooks(self).optimizer_implementation(self.root_device.type),
            "ep_size": experts.ep_size(self.lightning_module),
        }

    @property
    def _zero(self) -> dict[str, Any]:
        return self.config.get("zero_optimization", {})

    def _initialize_deepspeed_train(self, model: Module) -> None:
        if (before := vars(model).get(ENGINE)) is not None:
            before.destroy()
        super()._initialize_deepspeed_train(model)
        EngineHooks(self).link_master_weights()
        EngineHooks(self).clip_experts_too()
        self._training_engine = vars(model)[ENGINE] = self.model  # setattr would make the engine a submodule
        engine: Any = self.model
        if self.world_size == 1 and not engine.zero_optimization():
            # One rank has nothing to average. DeepSpeed (0.19.8) would copy all gradients for an all-reduce.
            engine.enable_backward_allreduce = False
        if self.zero_stage_3 and self.world_size > 1 and self.is_global_zero:
            total = sum(parameter.ds_numel for parameter in engine.module.parameters())
            sharded = total - sum(parameter.ds_numel for parameter in engine.optimizer.persistent_parameters)
            how = "" if sharded == total else "; --zero.param_persistence_threshold 0 shards all"
            say(f"ZeRO 3 shards {sharded:,} of {total:,} parameters{how}")

    def _setup_model_and_optimizer(self, model: Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.group_names = [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
        for group, own in zip(optimizer.param_groups, self.group_names, strict=True):
            group.setdefault("param_names", own)  # needed to restore the checkpoint in another layout
        # SuperOffload starts a process, which inherits the handling of Ctrl-C. Ctrl-C must not end it before the run is
        # saved.
        spawns = self._zero.get("offload_optimizer", {}).get("super_offload")
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if spawns else None
        started = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        if spawns:
            signal.signal(signal.SIGINT, handler)
        return started

    def _initialize_deepspeed_inference(self, model: Module) -> None:
        if self._training_engine is not None and self._training_engine.module is model:
            self.model = self._training_engine
        else:
            super()._initialize_deepspeed_inference(model)

    def teardown(self) -> None:
        """Ends a fit or a test, and restores torch's linear function. After a fit, the model stays on the engine's
        device."""
        torch.nn.functional.linear = LINEAR
        if self._training_engine is None:
            super().teardown()
            return
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def import_muon_uncompiled() -> None:
    """Imports DeepSpeed's Muon optimizer without compiling its kernels. Every ZeRO stage imports it in its first step,
    whatever the optimizer is, and the import would load torch's compiler, which takes 1.2 s (DeepSpeed 0.19.8,
    zero/muon/original_muon.py)."""
    compile = torch.compile
    torch.compile = lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        torch.compile = compile
