"""The typed flags, the command line, the rules that refuse nonsense, and the strategies' specifications; no torch."""
