"""Chat templates render, and mark answers, as `transformers` does."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from models.data.chat import ChatTemplate
from models.pretrained.saving import KEPT_FILES, copy_files
from models.tiny_checkpoint import byte_tokenizer
from tests.parity.renderers import RENDERERS, chat_template

EXAMPLE = Path(__file__).parents[2] / "examples" / "tune_chat.py"
GENERATION = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("role " + message.role) }}
    {%- endif %}
<|{{ message.role }}|>
{% if message.role == "assistant" %}{% generation %}{{ message.content | trim }}{{ eos_token }}
{% endgeneration %}{% else %}{{ message.content }}{% if message.extra %}{{ message.extra | tojson }}{% endif %}

{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|assistant|>
{% endif %}"""
LOOPS = """{%- for message in messages %}{% if loop.index > 9 %}{% break %}{% endif %}
{{ '<' + message['role'] + '>' }}{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' }}
{%- endfor %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
TALK = [
    {"role": "system", "content": "Be brief & precise <here>."},
    {"role": "user", "content": "1+1?", "extra": {"ä": ["<", 1.5]}},
    {"role": "assistant", "content": " two "},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture(params=RENDERERS)
def renderer(request):
    return request.param


@pytest.fixture(params=[GENERATION, LOOPS], ids=["generation", "loops"])
def both(request, renderer, tmp_path):
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token="^", eos_token="~")
    theirs.chat_template = request.param
    theirs.save_pretrained(tmp_path)
    return chat_template(tmp_path, renderer), theirs


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("tools", [None, [{"name": "add", "text": "a < b & c"}]])
def test_texts_are_equal(both, asks, tools):
    ours, theirs = both
    wanted = theirs.apply_chat_template(TALK, tools=tools, tokenize=False, add_generation_prompt=asks)
    assert ours.text(TALK, {"tools": tools}, asks=asks) == wanted


def test_answers_are_those_marked_by_the_template(both):
    ours, theirs = both
    ((tokens, context, _),) = ours.examples(TALK)
    wanted = theirs.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    np.testing.assert_array_equal(tokens, wanted["input_ids"])
    if "{% generation %}" in theirs.chat_template:
        np.testing.assert_array_equal(~context, np.array(wanted["assistant_masks"], bool))


@pytest.mark.thorough
def test_a_tuned_model_answers_alike(tmp_path):
    spec = importlib.util.spec_from_file_location("tune_chat", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", attn_implementation="eager").eval()
    words = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "run" / "model" / "tokenizer.json"))
    words.chat_template = (tmp_path / "run" / "model" / "chat_template.jinja").read_text()
    talk = [{"role": "user", "content": example.ASKED[0].format("spider")}]
    asked = words.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found = model.generate(asked["input_ids"], max_new_tokens=48, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert words.decode(found).split("\n")[0] == '{"animal": "spider", "legs": 8}'


def test_saved_folders_keep_the_template(both, tmp_path):
    ours, theirs = both
    (tmp_path / "saved").mkdir()
    copy_files(KEPT_FILES, tmp_path, tmp_path / "saved")
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    assert again.chat_template == theirs.chat_template
    assert ChatTemplate(tmp_path / "saved").text(TALK, asks=True) == ours.text(TALK, asks=True)
