"""Starts from existing weights, trains some of them or adapters next to them, and stores only those."""
