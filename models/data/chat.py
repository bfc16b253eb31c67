"""Conversations as training data: JSON lines with `messages`, rendered by the chat template of a checkpoint."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from jax_moe_lb.core import FileLimits
from jax_moe_lb.core.checks import shown
from jax_moe_lb.core.file_limits import read_bytes
from models.architectures.config_json import read_settings
from models.data.renderers import PARAMETERS, renderer
from models.data.sandbox import Rendering
from models.data.tokenizers import encoded_with_offsets, end_tokens, read_tokenizer

MESSAGES_FIELD = "messages"  # JSON field of a conversation: objects with `role` and `content`

# JSON field of a conversation with variables of the template, as in `transformers`.
VARIABLES_FIELD = "chat_template_kwargs"
SETTINGS = "tokenizer_config.json"  # file with special tokens, and in older checkpoints the template

# Names of the reasoning of a message. As in `transformers` 5, a template finds any of them under the first two.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
PROBE = "\N{OBJECT REPLACEMENT CHARACTER}"  # answer that differs from every generation prompt in its first character

Messages = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any]
NO_VARIABLES: Variables = MappingProxyType({})


def read_variables(texts: Sequence[str]) -> dict[str, Any]:
    """Parse the option `--template-set`, NAME=VALUE each; a value that is no JSON is a text."""
    variables = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"template_set is {text!r}; expected NAME=VALUE")
        variables[name] = value
        with suppress(ValueError):
            variables[name] = json.loads(value)
    return variables


class Example(NamedTuple):
    """Tokens to learn from."""

    tokens: np.ndarray  # int32 `[T]`
    context: np.ndarray  # bool `[T]`, True for tokens of the context, which are not predicted
    num_endless: int = 0  # number of answers without an end token of the checkpoint


class ChatTemplate:
    """Chat template and tokenizer of a checkpoint; files that cannot be read, or an invalid template, are refused."""

    # The template is a Jinja program in `chat_template.jinja` or in `tokenizer_config.json`. `fixed` are variables for
    # all conversations, which override the variables of one. `tokenizer` replaces that of the checkpoint.

    def __init__(
        self,
        folder: Path,
        limits: FileLimits = FileLimits(),
        answers: str = "all",
        fixed: Variables = NO_VARIABLES,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.tokenizer = read_tokenizer(folder / "tokenizer.json", limits) if tokenizer is None else tokenizer
        self.answers, self.fixed = answers, fixed
        settings = read_settings(folder / SETTINGS, limits)
        self.special = {name: _text(value) for name, value in settings.items() if name.endswith("_token")}
        source = _source(folder, settings, limits)
        if source is None:
            raise ValueError(f"checkpoint is {str(folder)!r}, which has no chat template; expected chat_template.jinja")
        try:
            self.render = renderer(source)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        has_config = any((folder / name).exists() for name in ("generation_config.json", "config.json"))
        ends = [*(end_tokens(folder, limits) if has_config else ()), self.tokenizer.token_to_id(self._end)]
        texts = {self.tokenizer.decode([end], skip_special_tokens=False): end for end in ends if end is not None}
        self.ends = {text: end for text, end in texts.items() if text}

    @property
    def _end(self) -> str:
        return self.special.get("eos_token", "")

    def text(self, messages: Messages, variables: Variables = NO_VARIABLES, *, asks: bool = False) -> str:
        """Render a conversation; with `asks` append the beginning of an answer."""
        # A field that is `None`, as the content of a tool call in OpenAI's format, is absent for the template.
        return self._rendered(messages, variables, asks).text

    def _rendered(self, messages: Messages, variables: Variables, asks: bool = False) -> Rendering:
        given = {"messages": [_given(message) for message in messages], "add_generation_prompt": asks}
        variables = {**variables, **self.fixed}
        if own := {*given, *PARAMETERS} & variables.keys():
            raise ValueError(f"{VARIABLES_FIELD} has {min(own)!r}; expected variables besides the conversation")
        return self.render({"tools": None, "documents": None, **self.special, **variables, **given})

    def prompt(self, messages: Messages, variables: Variables = NO_VARIABLES) -> list[int]:
        """Return the tokens of a conversation, up to the beginning of the next answer."""
        return encoded_with_offsets(self.tokenizer, self.text(messages, variables, asks=True))[0]

    def examples(self, messages: Messages, variables: Variables = NO_VARIABLES) -> list[Example]:
        """Tokenize a conversation for training on the answers and their end tokens."""
        # If the template encloses answers in `generation` blocks, these are learned, as in `transformers`. Otherwise an
        # answer begins after the text that it shares with the request for one. A template may change earlier answers,
        # for instance leave out their reasoning. Then a changed answer is in an example of its own, with the
        # conversation before it.
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not numbers:
            raise ValueError("no message has the role 'assistant'; expected an answer to learn")
        if self.answers == "last":
            asked = [i for i, message in enumerate(messages[: numbers[-1]]) if message["role"] == "user"]
            numbers = [i for i in numbers if i > max(asked, default=-1)]
        whole = self._rendered(messages[: numbers[-1] + 1], variables)
        if whole.answers:
            first = _num_shared(whole.text, self.text(messages[: numbers[0]], variables)) if numbers[0] else 0
            return [self._marked(whole.text, [answer for answer in whole.answers if answer[0] >= first])]
        drafts: list[_Draft] = []
        for i in numbers:
            draft = self._draft(messages[: i + 1], variables)
            earlier = self._kept(drafts[-1], draft.text) if drafts else None
            if earlier is not None:
                del drafts[-1]
            drafts.append(draft._replace(answers=[*(earlier or []), *draft.answers]))
        return [self._ended(draft, variables) for draft in drafts]

    def _draft(self, messages: Messages, variables: Variables) -> "_Draft":
        """Render a conversation that ends with an answer, and locate the answer."""
        text, asked = self.text(messages, variables), self.text(messages[:-1], variables, asks=True)
        begin = len(asked)
        if not text.startswith(asked):
            # The request for an answer may have more than the beginning of every answer, such as `<think>`.
            probe = self.text([*messages[:-1], {"role": "assistant", "content": PROBE}], variables)
            begin = _num_shared(text, asked, probe)
            request = asked[_num_shared(asked, self.text(messages[:-1], variables)) :]
            if begin < len(asked) - len(request):
                # An answer may change the messages before it: gpt-oss leaves out the reasoning of tool calls.
                begin = probe.rfind(request) + len(request)
                if not len(request) <= begin <= _num_shared(text, probe) or not request:
                    raise ValueError("the chat template begins an answer in another way than it asks for one")
        return _Draft(messages, text, [(begin, len(text))])

    def _kept(self, draft: "_Draft", text: str) -> list[tuple[int, int]] | None:
        """Return the answers of a draft in the text of a longer one, `None` if the text changes them."""
        if text.startswith(draft.text):
            return draft.answers
        # Some templates append the end token to the conversation, after the end of its last answer.
        begin, shorter = draft.answers[-1][0], draft.text.removesuffix(self._end)
        if text.startswith(shorter) and self._stops(shorter[begin:]):
            return [*draft.answers[:-1], (begin, len(shorter))]
        return None

    def _stops(self, answer: str) -> bool:
        """Return whether the last token of an answer, without white space, is an end token."""
        return any(text.endswith(end) for end in self.ends for text in (answer, answer.rstrip()))

    def _ended(self, draft: "_Draft", variables: Variables) -> Example:
        """Tokenize a draft, whose answers end with an end token if there is one behind them, or no text."""
        tokens, offsets = encoded_with_offsets(self.tokenizer, draft.text)
        begins = np.array([begin for begin, _ in offsets], np.int64)
        learned, num_endless = np.zeros(len(tokens), bool), 0
        for begin, end in draft.answers:
            learned |= (begins >= begin) & (begins < end)
            following = int((begins < end).sum())
            if self._stops(draft.text[begin:end]):
                continue
            if following < len(tokens) and tokens[following] in self.ends.values():
                learned[following] = True
            elif following == len(tokens) and self.ends:
                tokens, learned = [*tokens, self._end_after(draft, variables)], np.append(learned, True)
                break
            else:
                num_endless += 1
        return Example(np.array(tokens, np.int32), ~learned, num_endless)

    def _end_after(self, draft: "_Draft", variables: Variables) -> int:
        """Return the end token between the last answer and the text of a next message, or else the first one."""
        role = "tool" if "tool_calls" in draft.messages[-1] else "user"
        with suppress(ValueError):
            longer = self.text([*draft.messages, {"role": role, "content": PROBE}], variables).rpartition(PROBE)[0]
            for end, token in self.ends.items():
                before, found, _ = longer.rpartition(end)
                if found and before.endswith(draft.text[-1:]):
                    return token
        return next(iter(self.ends.values()))

    def _marked(self, text: str, answers: list[tuple[int, int]]) -> Example:
        """Tokenize a text, and learn the tokens that overlap with marked answers."""
        tokens, offsets = encoded_with_offsets(self.tokenizer, text)
        places, learned = np.array(offsets, np.int64).reshape(-1, 2), np.zeros(len(tokens), bool)
        for begin, end in answers:
            learned |= (places[:, 0] < end) & (places[:, 1] > begin) & (begin < end)
        num_endless = sum(not self._stops(text[begin:end]) for begin, end in answers)
        return Example(np.array(tokens, np.int32), ~learned, num_endless)


class _Draft(NamedTuple):
    """Conversation up to an answer."""

    messages: Messages  # the messages
    text: str  # rendered messages
    answers: list[tuple[int, int]]  # offsets of the first character of each answer, and of the one after its last


def _num_shared(*texts: str) -> int:
    """Return the length of the longest common prefix."""
    differing = (i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1)
    return next(differing, min(map(len, texts)))


def _given(message: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = [given[name] for name in REASONING_FIELDS if name in given]
    return {"thinking": reasoning[0], **given, "reasoning_content": reasoning[0]} if reasoning else given


def has_chat_template(folder: Path, limits: FileLimits = FileLimits()) -> bool:
    """Return whether a checkpoint has a chat template."""
    return _source(folder, read_settings(folder / SETTINGS, limits), limits) is not None


def conversation_in(value: Mapping[str, Any]) -> tuple[Messages, dict[str, Any]]:
    """Return the messages of a JSON object, and the variables of the template."""
    messages = value[MESSAGES_FIELD]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{MESSAGES_FIELD} is {shown(messages)}; expected a list of objects")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{MESSAGES_FIELD} has {shown(message)}; expected an object with a role")
        if not isinstance(message.get("content", ""), str | list | None):
            raise ValueError(f"{MESSAGES_FIELD} has {shown(message)}; expected a text as content")
    variables = value.get(VARIABLES_FIELD) or {}
    if not isinstance(variables, dict):
        raise ValueError(f"{VARIABLES_FIELD} is {shown(variables)}; expected an object")
    lists = {name: value.get(name) for name in ("tools", "documents")}
    for name, given in lists.items():
        if not isinstance(given, list | None) or not all(isinstance(one, dict) for one in given or ()):
            raise ValueError(f"{name} is {shown(given)}; expected a list of objects")
    return messages, variables | {name: given for name, given in lists.items() if given is not None}


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
