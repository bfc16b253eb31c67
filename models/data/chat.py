"""Conversations as training data: JSON lines with `messages`, rendered by the chat template of a checkpoint."""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.file_limits import read_bytes
from jax_moe_lb.recordings.yaml_file import shown
from models.architectures.config_json import read_settings
from models.data.tokenizers import encoded_with_offsets, read_tokenizer

MESSAGES_FIELD = "messages"
"""JSON field of a conversation: objects with `role` and `content`."""

SETTINGS = "tokenizer_config.json"
"""File with special tokens, and in older checkpoints the template."""

MOST_TEXT = 2**24
"""Maximum number of characters of a rendered conversation, and of a text or list in a template."""

MOST_BITS = 2**10
"""Maximum number of bits of an integer in a template."""

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """Chat template and tokenizer of a checkpoint.

    The template is a Jinja program in `chat_template.jinja` or in `tokenizer_config.json`. It runs in Jinja's immutable
    sandbox, with the functions that `transformers` offers.

    Args:
        folder: folder of the checkpoint.
        limits: limits of its files.

    Raises:
        ValueError: a file cannot be read, or the checkpoint has no valid template.
    """

    def __init__(self, folder: Path, limits: FileLimits = FileLimits()) -> None:
        self.tokenizer = read_tokenizer(folder / "tokenizer.json", limits)
        settings = read_settings(folder / SETTINGS, limits)
        self.special = {name: _text(value) for name, value in settings.items() if name.endswith("_token")}
        source = _source(folder, settings, limits)
        if source is None:
            raise ValueError(f"checkpoint is {str(folder)!r}, which has no chat template; expected chat_template.jinja")
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        environment.filters["tojson"] = _to_json
        try:
            self.template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            # The compiler of Python refuses a `break` outside a loop.
            raise ValueError(f"{folder}: the chat template is not valid: {shown(str(error))[1:-1]}") from error

    def text(self, messages: Messages, *, asks: bool = False, tools: Any = None) -> str:
        """Render a conversation.

        Args:
            messages: objects with `role`, `content` and other fields of the template. A field that is `None`, as
                the content of a tool call in OpenAI's format, is absent for the template.
            asks: if True, append the beginning of an answer.
            tools: descriptions of tools, passed to the template; `None` (default) for none.

        Raises:
            ValueError: the template refuses the messages, or its text has more than `MOST_TEXT` characters.
        """
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            parts = self.template.generate(messages=given, add_generation_prompt=asks, tools=tools, **self.special)
            return _limited_text(parts)
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise ValueError(f"the chat template refuses the messages: {shown(str(error))[1:-1]}") from error

    def question(self, text: str) -> list[int]:
        """Return the tokens of a question, up to the beginning of the answer."""
        asked = self.text([{"role": "user", "content": text}], asks=True)
        return encoded_with_offsets(self.tokenizer, asked)[0]

    def examples(self, messages: Messages, tools: Any = None) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokenize a conversation for training on the answers.

        A template may change earlier answers, for instance leave out their reasoning. Then every answer is an example
        of its own, after the conversation before it. Otherwise one example has all answers.

        Args:
            messages: the conversation, with an answer of the role `assistant`.
            tools: as for `text`.

        Returns:
            Pairs of int32 tokens `[T]` and bool `[T]`, True for tokens of the context, which are not predicted.

        Raises:
            ValueError: no message is an answer, or the template does not begin an answer as it asks for one.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise ValueError("no message has the role 'assistant'; expected an answer to learn")
        parts = [self._answer(messages, i, tools) for i in answers]
        whole = parts[-1][0]
        if all(whole.startswith(text) for text, _ in parts):
            return [self._tokenized(whole, [(begin, len(text)) for text, begin in parts])]
        return [self._tokenized(text, [(begin, len(text))]) for text, begin in parts]

    def _answer(self, messages: Messages, i: int, tools: Any) -> tuple[str, int]:
        """Return the conversation up to answer `i`, and the offset of the answer."""
        text, question = self.text(messages[: i + 1], tools=tools), self.text(messages[:i], asks=True, tools=tools)
        if not text.startswith(question):
            raise ValueError("the chat template begins an answer in another way than it asks for one")
        return text, len(question)

    def _tokenized(self, text: str, answers: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        tokens, offsets = encoded_with_offsets(self.tokenizer, text)
        begins = np.array([begin for begin, _ in offsets], np.int64)
        inside = np.zeros(len(tokens), bool)
        for begin, end in answers:
            inside |= (begins >= begin) & (begins < end)
        return np.array(tokens, np.int32), ~inside


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

    def concatenated(self, values: Iterable[Any]) -> str:
        """Return the text of all values."""
        return _limited_text(map(str, values))


def _limited_text(parts: Iterable[str]) -> str:
    texts, length = [], 0
    for part in parts:
        length += len(part)
        _require_few(length, MOST_TEXT)
        texts.append(part)
    return "".join(texts)


def _require_few(number: int, most: int) -> None:
    if number > most:
        _raise(f"a value has size {shown(number)}; expected at most {most}")


_FAILURES = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError)
"""Errors of Python in a template, besides those of Jinja."""


class _Generation(Extension):
    """The block `generation`, with which some templates enclose answers; here the question's length locates them."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (the base class has it as a variable of instances)

    def parse(self, parser: Parser) -> Any:
        """Return the statements of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def has_chat_template(folder: Path, limits: FileLimits = FileLimits()) -> bool:
    """Return whether a checkpoint has a chat template."""
    return _source(folder, read_settings(folder / SETTINGS, limits), limits) is not None


def conversation_in(value: Mapping[str, Any]) -> Messages:
    """Return the messages of a line of JSON.

    Raises:
        ValueError: they are not a list of objects with texts as `role` and `content`.
    """
    messages = value[MESSAGES_FIELD]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{MESSAGES_FIELD} is {shown(messages)}; expected a list of objects")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{MESSAGES_FIELD} has {shown(message)}; expected an object with a role")
        if not isinstance(message.get("content", ""), str | list | None):
            raise ValueError(f"{MESSAGES_FIELD} has {shown(message)}; expected a text as content")
    return messages


def _source(folder: Path, settings: dict[str, Any], limits: FileLimits) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_bytes(path, limits).decode(errors="replace")
    named = settings.get("chat_template")
    if isinstance(named, list):
        # Older checkpoints have several templates with names.
        texts = {one.get("name"): one.get("template") for one in named if isinstance(one, dict)}
        named = texts.get("default")
    return named if isinstance(named, str) else None


def _text(value: Any) -> str:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes characters of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
