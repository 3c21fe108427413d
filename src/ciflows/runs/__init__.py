"""Runs: configure, train, score and compare models, each in a folder of its own."""
