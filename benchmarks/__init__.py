"""Measurements. Each says in its first lines how it is run."""
