"""Jinja's sandbox for the chat templates of checkpoints, which anyone may have written."""

import datetime
import json
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jax_moe_lb.core.checks import shown

MOST_TEXT = 2**24  # maximum number of characters of a rendered conversation
MOST_BITS = 2**10  # maximum number of bits of an integer in a template
MOST_BYTES = 2**30  # maximum memory that a template may add to the process, on Linux

_LOCK = threading.Lock()  # held while the limit of the process is changed


@dataclass
class Rendering:
    """Text of a conversation."""

    text: str = ""  # rendered text
    # Offsets of the first character of each `generation` block, and of the one after its last
    answers: list[tuple[int, int]] = field(default_factory=list)
    length: int = 0


Renderer = Callable[[Mapping[str, Any]], Rendering]  # from the variables of a template, `messages` among them


def sandboxed(source: str) -> Renderer:
    """Compile a chat template, with the functions that `transformers` offers."""
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    # Jinja's own filter escapes characters of HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    with limited("is not valid"):
        template = environment.from_string(source)

    def render(variables: Mapping[str, Any]) -> Rendering:
        rendering, parts = Rendering(), []
        with limited("refuses the messages"):
            # The template continues after each part, so `length` is the offset of the next one.
            for part in template.generate({**variables, RENDERING: rendering}):
                rendering.length += len(part)
                require_few(rendering.length, MOST_TEXT)
                parts.append(part)
        rendering.text = "".join(parts)
        return rendering

    return render


@contextmanager
def limited(failure: str) -> Iterator[None]:
    """Limit the memory of a template, and end its errors with one line containing `failure`."""
    try:
        with _limited_memory():
            yield
    except (jinja2.TemplateError, *FAILURES) as error:
        reason = "out of memory" if isinstance(error, OUT_OF_MEMORY) else shown(str(error))[1:-1]
        raise ValueError(f"the chat template {failure}: {reason}") from error


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit the memory of the process to its current size and `MOST_BYTES`, on Linux."""
    memory, kind = Path("/proc/self/statm"), resource.RLIMIT_AS
    if not memory.exists():
        yield
        return
    with _LOCK:
        before = resource.getrlimit(kind)
        most = int(memory.read_text().split()[0]) * resource.getpagesize() + MOST_BYTES
        resource.setrlimit(kind, (min([most, *(one for one in before if one != resource.RLIM_INFINITY)]), before[1]))
        try:
            yield
        finally:
            resource.setrlimit(kind, before)


RENDERING = "_rendering"  # variable of templates with their `Rendering`


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox whose numbers are small: products and powers of large ones would take long."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return `left * right` or `left ** right`."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            require_few(bits, MOST_BITS)
        return super().call_binop(context, operator, left, right)


def require_few(number: int, most: int) -> None:
    """Refuse a text or number above the limit."""
    if number > most:
        _raise(f"a value has size {shown(number)}; expected at most {most}")


# Jinja compiles its traceback, and the compiler of Python may end with `SystemError` out of memory.
OUT_OF_MEMORY = (MemoryError, SystemError)

# Errors of Python in a template, besides those of Jinja. The compiler of Python refuses a `break` outside a loop.
FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, SyntaxError, RuntimeError, *OUT_OF_MEMORY)


class _Generation(Extension):
    """The block `generation`, with which some templates enclose answers."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (the base class has it as a variable of instances)

    def parse(self, parser: Parser) -> Any:
        """Return a call of `located` with the text of the block, as in `transformers`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("located"), [], [], body).set_lineno(line)

    @jinja2.pass_context
    def located(self, context: jinja2.runtime.Context, caller: Any) -> str:
        """Return the text of a block, and add its offsets to the rendering."""
        text, rendering = caller(), context[RENDERING]
        rendering.answers.append((rendering.length, rendering.length + len(text)))
        return text


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
