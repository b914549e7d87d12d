"""Executors: everything that can carry out a step plan."""
