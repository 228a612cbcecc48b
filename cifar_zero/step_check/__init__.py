"""Checks the steps of a run while it trains, with the Lightning callback `StepCheck`, for any module and strategy."""
