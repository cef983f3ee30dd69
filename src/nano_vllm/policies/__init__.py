"""Policies: one file is one order of requests. `key(request)`: the smaller runs first; the largest is preempted first.

USES_PRIORITY: whether the order depends on `request.priority`; where it does not, a priority is refused.
"""
