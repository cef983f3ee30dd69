"""Policies: one file is one order of requests. `key(request)`: the smaller runs first; the largest is preempted first."""
