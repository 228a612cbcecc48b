"""Checks the steps of a training in place, with the Lightning callback `StepCheck`, for any module and strategy."""
