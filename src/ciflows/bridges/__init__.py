"""Flows inside other libraries: `bridges.sbi` and `bridges.pyro`, each imported with its library."""
