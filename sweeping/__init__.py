"""What sweep.py is made of: the space, Optuna's study, runs side by side, what they came to."""
