"""Published chat templates, read from the package trl: texts and learned tokens equal those of transformers."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from models.tiny_checkpoint import byte_tokenizer
from tests.parity.renderers import RENDERERS, chat_template

FOLDER = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
BAR = "\N{FULLWIDTH VERTICAL LINE}"
END = {name: ["<|im_end|>"] for name in ("qwen3", "qwen3_instruct_2507", "qwen2_5", "qwen3_5_think", "qwen3_6")}
END |= {name: ["<|im_end|>"] for name in ("qwen3_8", "lfm2_v2", "nemotron_3_nano")}
END |= {
    "llama3": ["<|eot_id|>"],
    "deepseekv3": [f"<{BAR}end▁of▁sentence{BAR}>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "phi3_5": ["<|endoftext|>", "<|end|>"],
}
"""End tokens of the published checkpoints by template."""

SPECIAL = re.compile(
    rf"<\|[A-Za-z0-9_ ]+\|>|<{BAR}[^{BAR}\n]{{1,40}}{BAR}>|</?think>|</?tool_call>|</?tool_response>|\[gMASK\]|<sop>"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "description": name} for name in ("a", "b")},
            "required": ["a", "b"],
        },
    },
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOLD = {"role": "tool", "name": "add", "content": "3"}
SYSTEM = {"role": "system", "content": "You are terse."}


def user(content):
    return {"role": "user", "content": content}


def answer(content, **fields):
    return {"role": "assistant", "content": content, **fields}


CONVERSATIONS = {
    "single": [user("Hi there"), answer("Hello.")],
    "multi": [user("Hi"), answer("Hello."), user("2+2?"), answer("4"), user("bye"), answer("Bye.")],
    "system": [SYSTEM, user("Hi"), answer("Hello."), user("2+2?"), answer("4")],
    "tools": [SYSTEM, user("Add 1 and 2"), answer("", tool_calls=[CALL]), TOLD, answer("It is 3.")],
    "tools_none": [user("Add 1 and 2"), answer(None, tool_calls=[CALL]), TOLD, answer("It is 3.")],
    "reason": [
        user("2+2?"),
        answer("4", reasoning_content="two and two"),
        user("3+3?"),
        answer("6", reasoning_content="three and three"),
    ],
    "think_inline": [
        user("2+2?"),
        answer("<think>\ntwo and two\n</think>\n\n4"),
        user("3+3?"),
        answer("<think>\nthree\n</think>\n\n6"),
    ],
    "thinking": [user("2+2?"), answer("4", thinking="two and two")],
    "tools_later": [
        user("Hi"),
        answer("Hello."),
        user("Add 1 and 2"),
        answer(None, tool_calls=[CALL], reasoning="to add"),
        TOLD,
        answer("It is 3."),
    ],
    "ends_user": [user("Hi"), answer("Hello."), user("and?")],
    "parts": [user([{"type": "text", "text": "Hi"}]), answer([{"type": "text", "text": "Hello."}])],
    "emoji": [user("Grüße 🦊"), answer("Ünïcödé 🦊🦊 <ok> & 'q'")],
}


@pytest.fixture(scope="module")
def words():
    """Return a tokenizer of bytes that has the special tokens of all templates."""
    special = {token for path in FOLDER.glob("*.jinja") for token in SPECIAL.findall(path.read_text())}
    special |= {"<|endoftext|>", "<|im_end|>", "<|user|>", "<|observation|>", "<|return|>", "<|call|>"}
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in sorted(special)])
    return tokenizer


@pytest.fixture(params=[(name, by) for name in END for by in RENDERERS], ids="-".join, scope="module")
def both(request, words, tmp_path_factory):
    """Return our template, the tokenizer of transformers and the source of the training template for a name."""
    name, by = request.param
    folder = tmp_path_factory.mktemp(name)
    theirs = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token=END[name][0])
    theirs.chat_template = (FOLDER / f"{name}.jinja").read_text()
    theirs.save_pretrained(folder)
    ids = [theirs.convert_tokens_to_ids(end) for end in END[name]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return chat_template(folder, by), theirs, (FOLDER / f"{name}_training.jinja").read_text()


def rendered(theirs, messages, variables, **options):
    """Return the text of transformers, `None` if its template fails."""
    try:
        return theirs.apply_chat_template(messages, **variables, tokenize=False, **options)
    except Exception:
        return None


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_texts_are_equal(both, name):
    ours, theirs, _ = both
    messages, variables = CONVERSATIONS[name], {"tools": [TOOL]} if "tools" in name else {}
    for asks in (False, True):
        wanted = rendered(theirs, messages, variables, add_generation_prompt=asks)
        if wanted is None:
            with pytest.raises(ValueError, match="the chat template refuses the messages"):
                ours.text(messages, variables, asks=asks)
        else:
            assert ours.text(messages, variables, asks=asks) == wanted


def runs(tokenizer, tokens, learned):
    """Return the texts of successive learned tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(learned, int), [0]])))
    return [tokenizer.decode(list(tokens[begin:end]), skip_special_tokens=False) for begin, end in edges.reshape(-1, 2)]


def answers_of_training_template(theirs, template, messages, variables):
    """Return the text of the last answer of each conversation that ends with one."""
    found = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            options = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
            both = theirs.apply_chat_template(messages[: i + 1], **variables, **options)
            found.append(runs(theirs, np.array(both["input_ids"]), both["assistant_masks"])[-1])
    return found


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_answers_are_learned_with_their_ends(both, name):
    ours, theirs, template = both
    messages, variables = CONVERSATIONS[name], {"tools": [TOOL]} if "tools" in name else {}
    if rendered(theirs, messages, variables) is None:
        with pytest.raises(ValueError, match="the chat template refuses the messages"):
            ours.examples(messages, variables)
        return
    examples = ours.examples(messages, variables)
    learned = [text for example in examples for text in runs(theirs, example.tokens, ~example.context)]
    assert sum(example.num_endless for example in examples) == 0
    wanted = answers_of_training_template(theirs, template, messages, variables)
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i, mine, other in zip(numbers, learned, wanted, strict=True):
        if name == "parts" and "Hello" not in ours.text(messages):
            # The template for training has another text.
            assert mine == "<|im_end|>\n"
            continue
        header, is_inside, after = other.rpartition(mine)
        assert is_inside
        # The request for an answer is not learned, and ends with the header of the other mask.
        asked = ours.text(messages[:i], variables, asks=True).rstrip()
        assert any(text.endswith(header.rstrip()) for text in (asked, asked.removesuffix("<think>")))
        # Phi's template ends each conversation, and so only its last answer, with a further token.
        assert after in ("", theirs.eos_token if i < numbers[-1] else "")
