"""Starts ranks on this machine, which train one case after the other."""
