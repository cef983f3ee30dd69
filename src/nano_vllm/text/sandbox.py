"""Jinja for templates that come with a model: sandboxed, with the functions that Hugging Face's templates use, and bounded.

A template spends from one budget per rendering: a unit for each turn of a loop and each call, and each text or list that it makes
may have LARGEST characters or items. So a template that would never end, or fill the memory, ends with an error.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import wraps

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS = 200_000
LARGEST = 16_000_000
TOO_LARGE = "the template makes a number or a text that is too large"
PADDING_METHODS = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "replace", "join", "format", "format_map"})


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's part for training; its content is rendered as it stands."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Bounds(NodeTransformer):
    """Leads every loop's iterable and every `~` through the environment's counters."""

    def visit_For(self, node):
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node):
        self.generic_visit(node)
        joined = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(joined, "concatenated", [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. A rendering begins with `begin` and stays in one thread, which has its own budget."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
        self._spent = threading.local()
        self.filters |= {"tojson": tojson, "counted": self.counted, "concatenated": self.concatenated}
        for name in ("center", "indent", "replace", "format", "join"):
            self.filters[name] = self._bounded(self.filters[name])
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}

    def program(self, source: str):
        """A template of source, its loops and joins counted."""
        return self.from_string(Bounds().visit(self.parse(source)))

    def begin(self) -> None:
        """A full budget for this thread."""
        self._spent.steps = 0

    def spend(self) -> None:
        """Raises SecurityError when the budget is used up."""
        self._spent.steps = getattr(self._spent, "steps", 0) + 1
        if self._spent.steps > STEPS:
            raise SecurityError(f"the template takes more than {STEPS} steps")

    def counted(self, items: Iterable) -> Iterable:
        """The items of a loop; each turn is a step. A sized iterable keeps its size, which `loop.length` asks for."""
        return Counted(items, self) if hasattr(items, "__len__") else self._turns(items)

    def _turns(self, items: Iterable) -> Iterator:
        for item in items:
            self.spend()
            yield item

    def concatenated(self, items: list) -> str:
        return self.bounded("".join(map(str, items)))

    def bounded(self, value):
        """value, if it is not too large."""
        if isinstance(value, (str, bytes, list, tuple)) and len(value) > LARGEST:
            raise SecurityError(f"the template makes a text of more than {LARGEST} characters")
        return value

    def _bounded(self, function):
        """A filter whose arguments cannot ask for a giant padding, and whose result has a bound."""

        @wraps(function)
        def inner(*args, **kwargs):
            self._check_arguments(args, kwargs)
            if function.__name__ == "do_format" and _wide(args[0]):
                raise SecurityError(TOO_LARGE)
            return self.bounded(function(*args, **kwargs))

        return inner

    def _check_arguments(self, args, kwargs) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and value > LARGEST:
                raise SecurityError(f"the template asks for a text of more than {LARGEST} characters")

    def call(self, context, function, *args, **kwargs):
        """Every call of a template comes through here."""
        self.spend()
        if getattr(function, "__name__", "") in PADDING_METHODS:
            self._check_arguments(args, kwargs)
            self._check_pattern(function)
        return self.bounded(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value):
        """Jinja's door to `str.format`, where it has one."""
        self._check_pattern(value)
        return super().wrap_str_format(value)

    @staticmethod
    def _check_pattern(method) -> None:
        pattern = getattr(method, "__self__", None)
        if isinstance(pattern, str) and method.__name__.startswith("format") and re.search(r"\{[^{}]*\d{6}", pattern):
            raise SecurityError(TOO_LARGE)

    def call_binop(self, context, operator, left, right):
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, (str, list, tuple)) and isinstance(times, int) and len(many) * times > LARGEST:
                    raise SecurityError(f"the template makes a text of more than {LARGEST} characters")
        big = operator == "**" and isinstance(left, int) and isinstance(right, int)
        if (big and abs(right) * max(left.bit_length(), 1) > 4096) or (operator == "%" and _wide(left)):
            raise SecurityError(TOO_LARGE)
        return self.bounded(super().call_binop(context, operator, left, right))


class Counted:
    """A sized iterable whose items are counted as they are taken."""

    def __init__(self, items, sandbox: Sandbox) -> None:
        self.items, self.sandbox = items, sandbox

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator:
        return self.sandbox._turns(self.items)


def _wide(left) -> bool:
    """Whether a printf-like pattern asks for a field of more than 99,999 characters."""
    return isinstance(left, str) and re.search(r"%[^a-zA-Z%]*(\d{6}|\*)", left) is not None


def tojson(value, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """JSON as Hugging Face's templates expect it: no HTML escapes, other alphabets as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str):
    """Ends the rendering with the template's own words."""
    raise TemplateError(message)


def strftime_now(pattern: str) -> str:
    """The present local time in a strftime pattern."""
    return datetime.now().strftime(pattern)
