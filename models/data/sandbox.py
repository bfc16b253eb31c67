"""Jinja's sandbox for the chat templates of checkpoints, which anyone may have written."""

import datetime
import json
import resource
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jax_moe_lb.core.checks import shown

MOST_TEXT = 2**24  # maximum number of characters of a rendered conversation, and of a text or list in a template
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


def compiled(source: str) -> jinja2.Template:
    """Compile a chat template, with the functions that `transformers` offers."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    # Jinja's own filter escapes characters of HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    try:
        with _limited_memory():
            return environment.from_string(source)
    except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, SystemError) as error:
        # The compiler of Python refuses a `break` outside a loop, and may end with `SystemError` out of memory.
        raise ValueError(f"the chat template is not valid: {_reason(error)}") from error


def rendered(template: jinja2.Template, variables: Mapping[str, Any]) -> Rendering:
    """Render a template."""
    rendering = Rendering()
    try:
        parts = []
        with _limited_memory():
            # The template continues after each part, so `length` is the offset of the next one.
            for part in template.generate({**variables, RENDERING: rendering}):
                rendering.length += len(part)
                _require_few(rendering.length, MOST_TEXT)
                parts.append(part)
    except (jinja2.TemplateError, *FAILURES) as error:
        raise ValueError(f"the chat template refuses the messages: {_reason(error)}") from error
    rendering.text = "".join(parts)
    return rendering


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit the memory of the process to its current size and `MOST_BYTES`, on Linux."""
    # Filters, methods of texts and blocks may make a value of any size, unlike operators.
    memory, kind = Path("/proc/self/statm"), resource.RLIMIT_AS
    if not memory.exists():
        yield
        return
    with _LOCK:
        before = resource.getrlimit(kind)
        most = int(memory.read_text().split()[0]) * resource.getpagesize() + MOST_BYTES
        limits = [limit for limit in (most, *before) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min(limits), before[1]))
        try:
            yield
        finally:
            resource.setrlimit(kind, before)


def _reason(error: BaseException) -> str:
    return "out of memory" if isinstance(error, MemoryError) else shown(str(error))[1:-1]


RENDERING = "_rendering"  # variable of templates with their `Rendering`


class _CodeGenerator(CodeGenerator):
    """Code of templates whose operator `~` has a limit."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox whose operators make no texts, lists and numbers that would exhaust the memory."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return `left + right`, `left * right` or `left ** right`."""
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _require_few(len(left) + len(right), MOST_TEXT)
        for one, other in ((left, right), (right, left)) if operator == "*" else ():
            if isinstance(one, str | list | tuple) and isinstance(other, int):
                _require_few(len(one) * other, MOST_TEXT)
        if isinstance(left, int) and isinstance(right, int) and operator != "+":
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            _require_few(bits, MOST_BITS)
        return super().call_binop(context, operator, left, right)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raise the error of a template, without the traceback of Jinja, which needs memory."""
        raise

    def concatenated(self, values: Iterable[Any]) -> str:
        """Return the text of all values."""
        texts, length = [], 0
        for text in map(str, values):
            length += len(text)
            _require_few(length, MOST_TEXT)
            texts.append(text)
        return "".join(texts)


def _require_few(number: int, most: int) -> None:
    if number > most:
        _raise(f"a value has size {shown(number)}; expected at most {most}")


# Errors of Python in a template, besides those of Jinja.
FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError)


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
