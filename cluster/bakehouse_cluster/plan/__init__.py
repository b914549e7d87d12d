"""Capacity planning: the production scheduler and the production routing policy on a virtual clock."""
