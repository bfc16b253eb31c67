"""Conversations: rendering, tokens of answers, and documents that do not see each other."""

import json
import re
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_moe_lb import plain
from models.architectures.config_json import Fields
from models.architectures.registry import configured
from models.config import DataConfig, ParallelConfig, TrainConfig
from models.data import renderers, sandbox
from models.data.chat import ChatTemplate, conversation_in, read_variables
from models.data.marks import marked, positions_in, segments
from models.data.sources import corpus_from
from models.data.tokenizers import TokenizerFile
from models.mesh import make_mesh
from models.tiny_checkpoint import byte_tokenizer, tiny_config
from models.training.optimizer import decays_weights
from models.training.step import make_programs
from tests.marks import parametrize
from tests.models.small import filled

TEMPLATE = """{%- for message in messages %}
[{{ message.role }}] {{ message.content | trim }}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
[assistant]
{%- endif %}"""
KEPT = "(message.content if loop.last or message.role == 'user' else 'left out')"
FORGETFUL = TEMPLATE.replace("message.content", KEPT)
DOUBLED = "{{% set n = namespace(x='x') %}}{{% for i in range(99) %}}{{% set n.x = {} %}}{{% endfor %}}"
LONG = "{% for i in range(99999) %}" + "x" * 999 + "{% endfor %}"
TALK = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "~"}}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def shown(tokens):
    return byte_tokenizer().decode(list(tokens))


def test_only_answers_and_their_ends_are_predicted(folder):
    ((tokens, context, _),) = ChatTemplate(folder).examples(TALK)
    assert shown(tokens) == "[user] 1+1?~[assistant] 2~[user] 2+2?~[assistant] 4~"
    assert shown(tokens[~context]) == " 2~ 4~"


CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": None}}]}
TOOLS = TEMPLATE.replace(
    "{{ eos_token }}",
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{{ 'has' if 'name' in message }}{{ eos_token }}",
)


def test_absent_contents_are_not_the_text_none(folder):
    """As in OpenAI's format of tool calls; arguments of a call keep their null."""
    (folder / "chat_template.jinja").write_text(TOOLS)
    ((tokens, context, _),) = ChatTemplate(folder).examples([TALK[0] | {"name": None}, CALL])
    assert shown(tokens) == '[user] 1+1?~[assistant] [{"name": "add", "arguments": {"a": null}}]~'
    assert shown(tokens[~context]) == ' [{"name": "add", "arguments": {"a": null}}]~'
    absent = {name: value for name, value in CALL.items() if value is not None}
    assert ChatTemplate(folder).text([CALL]) == ChatTemplate(folder).text([absent])


def test_operators_within_the_limits_have_their_values(folder):
    cases = {
        "{{ '-' * 3 ~ 1 ~ none }}": "---1None",
        "{{ 2 ** 5 * 3 + 1 - 7 // 2 }}": "94",
        "{{ ([1] + [2]) * 2 }}": "[1, 2, 1, 2]",
        "{{ 'a' + 'b' }}{{ 1.5 * 2 }}{{ 3 + 0.5 }}": "ab3.03.5",
        "{{ messages[0]['content'] ~ bos_token }}": "1+1?",
    }
    for template, text in cases.items():
        (folder / "chat_template.jinja").write_text(template)
        assert ChatTemplate(folder).text(TALK) == text


def test_each_answer_is_an_example_if_the_template_changes_earlier_ones(folder):
    (folder / "chat_template.jinja").write_text(FORGETFUL)
    examples = ChatTemplate(folder).examples(TALK)
    assert [shown(tokens[~context]) for tokens, context, _ in examples] == [" 2~", " 4~"]
    assert "left out" in shown(examples[1][0])


TURNS = """{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
THINKS = TURNS.replace("}<assistant>{", "}<assistant><think>{{ '\\n' }}{").replace("content }}", "content }}~")
MARKED = """{%- for message in messages %}<{{ message.role }}>
{%- if message.role == "assistant" %}{% generation %}{{ message.content }}~{% endgeneration %}
{%- else %}{{ message.content }}{% endif %}{% endfor %}"""
TAILED = """{%- for message in messages %}<{{ message.role }}>{{ message.content }}!{% endfor %}
{%- if add_generation_prompt %}<assistant>{% else %}{{ eos_token }}{% endif %}"""


def chat_of(folder, template, ends="", answers="all"):
    """Return a template whose checkpoint has end tokens of one byte each."""
    (folder / "chat_template.jinja").write_text(template)
    ids = [byte_tokenizer().encode(end).ids[0] for end in ends]
    if ids:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return ChatTemplate(folder, answers=answers)


def learned_in(examples):
    """Return the learned text of each example."""
    return [shown(tokens[~context]) for tokens, context, _ in examples]


@pytest.mark.parametrize(
    ("answer", "learned"),
    [(same, same) for same in ("2", "<b>2", "<think>1 and 1</think>2", "")] + [("<think>\n1</think>2", "1</think>2")],
)
def test_an_answer_begins_after_the_text_shared_with_the_request(folder, answer, learned):
    """The request opens `<think>`, and an answer need not."""
    chat = chat_of(folder, THINKS)
    assert chat.text(TALK[:1], asks=True) == "<user>1+1?~<assistant><think>\n"
    examples = chat.examples([*TALK[:1], {"role": "assistant", "content": answer}, *TALK[2:]])
    assert learned_in(examples) == [f"{learned}~4~"]


REVISED = """{%- for message in messages %}<{{ message.role }}>
{%- if message.thinking and messages[-1].role != "assistant" %}({{ message.thinking }}){% endif %}
{%- if message.content is defined %}={% endif %}{{ message.content }}~{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def test_an_answer_may_change_the_messages_before_it(folder):
    """As in gpt-oss, which leaves out the reasoning of tool calls once they have an answer."""
    chat = chat_of(folder, REVISED)
    call = {"role": "assistant", "thinking": "so", "content": "call"}
    talk = [*TALK[:1], call, {"role": "tool", "content": "2"}, *TALK[1:]]
    assert "(so)" in chat.text(talk[:3], asks=True)
    assert learned_in(chat.examples(talk)) == ["=call~=2~=4~"]


def test_marked_answers_are_learned(folder):
    examples = chat_of(folder, MARKED).examples(TALK)
    assert learned_in(examples) == ["2~4~"]
    assert shown(examples[0].tokens) == "<user>1+1?<assistant>2~<user>2+2?<assistant>4~"
    assert learned_in(chat_of(folder, MARKED, answers="last").examples(TALK)) == ["4~"]
    endless = chat_of(folder, MARKED.replace("~", "")).examples(TALK)
    assert (learned_in(endless), endless[0].num_endless) == (["24"], 2)


@pytest.mark.parametrize("name", ["thinking", "reasoning", "reasoning_content"])
def test_reasoning_has_one_field(folder, name):
    message = {"role": "assistant", "content": "2", name: "so"}
    for read in ("thinking", "reasoning_content"):
        chat = chat_of(folder, "{% for message in messages %}{{ message." + read + " }}{% endfor %}")
        assert chat.text([message]) == "so"
        first = "so" if read == name == "thinking" else "first"
        assert chat.text([message | {"reasoning_content": "first"}]) == first


def test_an_answer_ends_with_the_next_role_if_it_is_an_end_token(folder):
    """As in GLM-4.5; the last answer gets the token that would follow."""
    (example,) = chat_of(folder, TURNS, ends=">^<").examples(TALK)
    assert shown(example.tokens) == "<user>1+1?<assistant>2<user>2+2?<assistant>4<"
    assert (learned_in([example]), example.num_endless) == (["2<4<"], 0)


def test_an_answer_without_an_end_gets_one_at_the_end_of_the_text(folder):
    (example,) = chat_of(folder, TURNS, ends="^").examples(TALK)
    assert shown(example.tokens) == "<user>1+1?<assistant>2<user>2+2?<assistant>4^"
    # The first answer has no place for one.
    assert (learned_in([example]), example.num_endless) == (["24^"], 1)


def test_an_end_of_the_conversation_behind_the_last_answer_splits_no_conversation(folder):
    (example,) = chat_of(folder, TAILED, ends="!").examples(TALK)
    assert shown(example.tokens) == "<user>1+1?!<assistant>2!<user>2+2?!<assistant>4!~"
    assert learned_in([example]) == ["2!4!~"]
    # Without another end, the first answer ends only in a text of its own.
    (folder / "generation_config.json").unlink()
    assert learned_in(chat_of(folder, TAILED).examples(TALK)) == ["2!~", "4!~"]


def test_only_the_last_answers_are_learned_on_request(folder):
    call = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "4"}]
    talk = [*TALK[:3], *call, TALK[3]]
    assert learned_in(chat_of(folder, TEMPLATE).examples(talk)) == [" 2~ call~ 4~"]
    assert learned_in(chat_of(folder, TEMPLATE, answers="last").examples(talk)) == [" call~ 4~"]
    assert learned_in(chat_of(folder, FORGETFUL, answers="last").examples(TALK)) == [" 4~"]


def corpus_of(folder, tmp_path, lines, **options):
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return corpus_from([tmp_path / "data.jsonl"], TokenizerFile(folder / "tokenizer.json"), **options)


def test_repeated_conversations_are_counted(folder, tmp_path):
    lines = [{"messages": TALK * 10}] * 3
    counts, notes = {}, {}
    for answers in ("all", "last"):
        corpus = corpus_of(folder, tmp_path, lines, chat=chat_of(folder, FORGETFUL, answers=answers))
        counts[answers], notes[answers] = len(corpus.parts[0].streams[0].tokens), corpus.notes(2000)[1:]
    assert counts["all"] > 9 * counts["last"]
    factor = f"{counts['all']:,} tokens in place of {counts['last']:,}, {counts['all'] / counts['last']:.1f} x"
    line = f"the chat template changes earlier answers: {factor}; data.answers=last learns the last alone"
    assert notes == {"all": [line], "last": []}
    endless = corpus_of(folder, tmp_path, lines, chat=chat_of(folder, TURNS, ends="^")).notes(2000)
    assert endless[1] == "57 answers end without an end token of the checkpoint; see generation_config.json"


def test_rows_have_variables_of_the_template(folder, tmp_path):
    chat = chat_of(folder, TEMPLATE + "{{ tools | tojson }}{{ documents | tojson }}{{ enable_thinking }}")
    given = {"tools": [{"name": "a"}], "documents": [{"title": "b"}]}
    given["chat_template_kwargs"] = {"enable_thinking": False}
    lines = [{"messages": TALK[:2]} | given, {"messages": TALK[:2]}]
    (one, other) = (chat.text(*conversation_in(line)) for line in lines)
    assert one.endswith('~[{"name": "a"}][{"title": "b"}]False')
    assert other.endswith("~nullnull")


def test_variables_for_all_conversations_override_those_of_one(folder):
    source = TEMPLATE + "{{ enable_thinking }}{{ mood }}"
    chat_of(folder, source)
    fixed = read_variables(["enable_thinking=false", "mood=a=b"])
    assert fixed == {"enable_thinking": False, "mood": "a=b"}
    chat = ChatTemplate(folder, fixed=fixed)
    assert chat.text(TALK[:2], {"enable_thinking": True}).endswith("~Falsea=b")
    with pytest.raises(ValueError, match="template_set is '=1'; expected NAME=VALUE"):
        read_variables(["=1"])
    with pytest.raises(ValueError, match="has 'messages'; expected variables besides"):
        ChatTemplate(folder, fixed={"messages": []}).text(TALK[:2])


def test_older_checkpoints_have_the_template_in_their_settings(folder):
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": TEMPLATE}]
    for template in (TEMPLATE, named):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "~", "chat_template": template}))
        assert ChatTemplate(folder).text(TALK[:2]) == "[user] 1+1?~[assistant] 2~"


def programs_of(config, **options):
    return make_programs(TrainConfig(data=DataConfig(**options)), make_mesh(ParallelConfig()), plain(), config)


def test_weight_decay_leaves_out_norms_biases_sinks_and_routers(all_devices):
    programs = programs_of(configured(Fields(tiny_config("gpt_oss"))))
    found = jax.tree.leaves_with_path(decays_weights(nnx.state(programs.model(programs.state_shapes), nnx.Param)))
    paths = {jax.tree_util.keystr(path, simple=True, separator="."): decays for path, decays in found}
    decayed = {re.sub(r"^stacks\.\d+\.\d+\.|\.value$", "", path) for path, decays in paths.items() if decays}
    attention = {f"attention.{name}.kernel" for name in ("q", "k", "v", "out")}
    assert decayed == attention | {"moe.up", "moe.gate", "moe.down", "embed.embedding", "head.kernel"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": []}, r"messages is \[\]; expected a list of objects"),
        ({"messages": [{"content": "a"}]}, "expected an object with a role"),
        ({"messages": [{"role": "user", "content": 3}]}, "expected a text as content"),
        ({"messages": TALK[:1]}, "no message has the role 'assistant'"),
        ({"other": 1}, "lacks the field 'text'"),
        ({"messages": TALK, "tools": "[]"}, "tools is '\\[\\]'; expected a list of objects"),
        ({"messages": TALK, "documents": {}}, "documents is {}; expected a list of objects"),
        ({"messages": TALK, "chat_template_kwargs": [1]}, r"chat_template_kwargs is \[1\]; expected an object"),
        ({"messages": TALK, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs has 'messages'; expected"),
    ],
)
def test_bad_conversations_are_refused_with_their_line(folder, tmp_path, line, message):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=f"whose line 2 .*{message}") as error:
        corpus_from([data], TokenizerFile(folder / "tokenizer.json"), chat=ChatTemplate(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "the chat template is not valid"),
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        # The sandbox has no attributes of Python's own objects.
        ("{{ messages.__class__.__mro__ }}", "refuses the messages"),
        ("{{ messages | length }}", "begins an answer in another way than it asks for one"),
        ("{{ messages[7].role }}", "refuses the messages"),
        ("{% break %}", "the chat template is not valid: 'break' outside loop"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "the chat template is not valid"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the messages: maximum recursion depth exceeded"),
        (LONG, "refuses the messages: a value has size"),
        ("{{ messages[0].content | center(10**12) | length }}", "refuses the messages: out of memory"),
        ("{{ messages[0].content.ljust(10**12) | length }}", "refuses the messages: out of memory"),
        ("{{ '%1000000000000d' % messages | length }}", "refuses the messages: out of memory"),
        ("{{ 'x' * 10**12 }}", "refuses the messages: out of memory"),
        ("{{ 10**12 * [0] }}", "refuses the messages: out of memory"),
        (DOUBLED.format("n.x ~ n.x"), "refuses the messages: out of memory"),
        (DOUBLED.format("n.x + n.x"), "refuses the messages: out of memory"),
        ("{{ 'x' | center(10**12) | length }}", "refuses the messages: out of memory"),
        ("{{ '%1000000000000d' % 1 }}", "refuses the messages: out of memory"),
    ],
)
def test_bad_templates_are_refused(folder, template, message):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ChatTemplate(folder).examples(TALK)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("template", ["{{ 10**(10**10) }}", "{{ 2**400 * 2**400 * 2**400 }}"])
def test_numbers_have_a_limit_in_the_sandbox(folder, monkeypatch, template):
    """The renderer of transformers has none, and may take long."""
    monkeypatch.setattr(renderers, "has_transformers", lambda: False)
    test_bad_templates_are_refused(folder, template, "refuses the messages: a value has size")


def test_a_block_of_a_template_has_a_limit_of_memory(folder, monkeypatch):
    block = "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(f"{{% set x %}}{block}{{% endset %}}{{{{ x }}}}")
    chat, before = ChatTemplate(folder), resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(sandbox, "MOST_BYTES", 2**26)
    with pytest.raises(ValueError, match="refuses the messages: out of memory"):
        chat.text(TALK)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_messages_without_a_template_are_refused(folder, tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": TALK}))
    with pytest.raises(ValueError, match=r"lacks the field 'text'.*messages need a chat template"):
        corpus_from([tmp_path / "data.jsonl"], TokenizerFile(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"has no chat template; expected chat_template\.jinja"):
        ChatTemplate(folder)


def test_documents_end_with_the_end_token(folder):
    *text, end = TokenizerFile(folder / "tokenizer.json", end=7).tokens(b"ab").tolist()
    assert (len(text), end) == (2, 7)


def test_positions_count_from_the_start_of_a_document():
    tokens = jnp.asarray(marked(np.arange(7)[None], np.array([[0, 0, 1, 0, 0, 1, 1]], bool), np.zeros((1, 7), bool)))
    assert segments(tokens).tolist() == [[0, 0, 1, 1, 1, 2, 3]]
    assert positions_in(segments(tokens)).tolist() == [[0, 1, 0, 1, 2, 0, 0]]


@pytest.mark.slow
@parametrize("name", ["gpt_oss"], ["deepseek_v3", "mixtral"])
def test_packed_documents_do_not_see_each_other(name, all_devices):
    """Their order in a sequence changes nothing, unless attention and positions cross documents."""
    config = configured(Fields(tiny_config(name)))
    starts, context = np.zeros((8, 6), bool), np.zeros((8, 6), bool)
    starts[:, 0] = context[:, 1:3] = True
    one, other = (marked(words, starts, context) for words in np.random.default_rng(0).integers(0, 200, (2, 8, 6)))
    orders = jnp.asarray(np.concatenate([one, other], 1)), jnp.asarray(np.concatenate([other, one], 1))

    def losses(within_documents):
        programs = programs_of(config, within_documents=within_documents)
        state = filled(programs.state_shapes)
        return [float(programs.evaluate(state, tokens)) for tokens in orders]

    apart = losses(within_documents=True)
    assert apart[0] == pytest.approx(apart[1], rel=1e-5)
    if name == "mixtral":
        mixed = losses(within_documents=False)
        assert abs(mixed[0] - mixed[1]) > 1e-4 * mixed[0]
