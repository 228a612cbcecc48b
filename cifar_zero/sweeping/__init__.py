"""What sweep.py is made of: the search space, Optuna's study, the runs of a setting, the report."""
