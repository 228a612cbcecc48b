"""Checks the steps of a training where they happen: `StepCheck`, a Lightning callback for any module and strategy."""
