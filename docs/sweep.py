"""Searches optimizer settings with Optuna: `python docs/sweep.py TRIALS [--<option of train> VALUE ...]`.

Each trial trains a run in this process, on one rank. The same command again adds trials to the study in runs/sweep.db.
"""

import sys
from pathlib import Path

import optuna

from cifar_zero.config import command_line
from cifar_zero.core.errors import RunError
from cifar_zero.train import train
from cifar_zero.training.resolve import resolve

trials, flags = int(sys.argv[1]), sys.argv[2:]


def val_acc(trial: optuna.Trial) -> float:
    """Trains a run with the settings that Optuna suggests. Returns the accuracy of its last validation. If the test set
    chose the settings, its accuracy would be too optimistic."""
    settings = {
        "--optimizer": trial.suggest_categorical("optimizer", ["sgd", "adam"]),
        "--optimizer.lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        "--name": f"trial_{trial.number}",
    }
    words = [str(word) for setting in settings.items() for word in setting]
    return train(resolve(command_line.parse(["--devices", "1", *flags, *words])))["val/acc"]


Path("runs").mkdir(exist_ok=True)
study = optuna.create_study(
    storage="sqlite:///runs/sweep.db", study_name="sweep", direction="maximize", load_if_exists=True
)
study.optimize(val_acc, trials, catch=RunError)  # a run that diverges is a failed trial
print(f"best trial {study.best_trial.number}: {study.best_params}, val/acc {study.best_value:.2%}")
