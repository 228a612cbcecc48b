"""`--strategy auto`: the launching process chooses a strategy once, before the ranks start. This imports torch."""

from dataclasses import replace

from cifar_zero.config import rules
from cifar_zero.config.flags import Config
from cifar_zero.core.console import say
from cifar_zero.core.errors import UsageError
from cifar_zero.launch import rank_environment
from cifar_zero.training.resolve import of_machine, on_this_machine


def choose(config: Config) -> str:
    """Returns the strategy that replaces auto, and prints which one and why. Raises UsageError if no strategy fits, or
    a launcher started the ranks, so that each would choose; to those of our own launcher train.py names the choice."""
    if rank_environment.is_rank():
        raise UsageError(
            "--strategy auto cannot be used with torchrun, srun or DeepSpeed's launcher, whose ranks would each "
            "choose: name the strategy that plan.py recommends"
        )
    say("--strategy auto: predicts the memory that each strategy needs on this machine")
    run = of_machine(on_this_machine(replace(config, strategy=Config.strategy)))
    rules.check_model(run)
    from cifar_zero.planning import machine
    from cifar_zero.planning.model_states import network_of
    from cifar_zero.planning.survey import recommended, survey

    room = machine.available(run.config)
    choice, reason = recommended(survey(run, network_of(run), room, {}), room)
    if choice is None:
        raise UsageError(f"--strategy auto: {reason}; or choose a strategy to try it anyway")
    say(f"--strategy auto: {reason}")
    return choice.strategy
