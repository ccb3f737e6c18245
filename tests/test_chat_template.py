"""Chat templates: the same text and ids as transformers gives, and one clear error for what cannot be written out."""

from typing import Any

import pytest
from tiny import BOS, CHAT_TEMPLATE, Make, make_tokenizer, tiny_engine

from pad_engine import SamplingParams, chat_template
from pad_engine.chat_template import MAX_CHARACTERS, chat_ids, chat_text
from pad_engine.engine import Engine
from pad_engine.errors import ModelError, RequestError
from pad_engine.models.loader import load_tokenizer
from pad_engine.models.sources import resolve
from pad_engine.prompt import encode

Message = dict[str, Any]


def say(*contents: str, system: str | None = None) -> list[Message]:
    """A chat whose messages are the user's and the assistant's in turns."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


TEMPLATES = {
    "tiny": CHAT_TEMPLATE,
    "bos": "{{ bos_token }}" + CHAT_TEMPLATE,
    "llama3": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{%- if tools is not none %}{{- "tools!" }}{%- endif %}
{{- system_message }}{{- eos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
""",
    "gemma": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
""",
    "namespace, macro, generation": """{%- set ns = namespace(count=0, self='me') -%}
{% macro tag(role, last=false) %}[{{ role | upper }}{% if last %}!{% endif %}]{% endmacro %}
{% for m in messages %}
  {% if m.role == 'assistant' %}
  {% generation %}{% set inner = 1 %}{{ tag(m.role) }}{{ m.content }}{% endgeneration %}{{ inner is defined }}
  {% else %}
  {% set ns.count = ns.count + 1 %}
{{ tag(m['role'], loop.last) }}{{ m.content }}{{ m | tojson }}{{ m.name | default('nobody') }}
  {% endif %}
{% endfor %}
{{ ns.count }}{{ messages | map(attribute='role') | join(',') }}{{ {'a': 'é<>'} | tojson(indent=2) }}""",
    "break, strftime, dict, undefined": """{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}
{% if m.role == 'system' %}{% continue %}{% endif %}
{{ m.content }} {{ loop.index0 }}{% endfor %} {{ strftime_now('%Y') }} {{ dict(a=1)['a'] }}{{ unk_token }}
{{ pad_token }}{{ documents }}{{ tools }}{{ nothing }}{{ 'abc'[::-1] }}{{ messages[-1]['content'].split('\\n') }}""",
}
CHATS = {
    "one": say("hello"),
    "system": say("hello ", system=" be brief"),
    "turns": say("one", " two\n", "three\n\nfour"),
    "unicode": say("naïve 日本語 😀\u2028", "\x00\x1b[31m", "<bos><eos>"),
    "syntax": say("{{ 7 * 7 }}{% raw %}", "{# no #}{% endfor %}", "{{ messages }}{{ raise_exception('no') }}"),
    "more keys": [{"role": "user", "content": "x", "name": "Ann", "tags": ["a", {"b": None}]}],
}


@pytest.fixture(scope="module")
def engine(make_model: Make) -> Engine:
    return tiny_engine(make_model("llama"))


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_equals_transformers(template: str, chat: list[Message]) -> None:
    tokenizer = make_tokenizer(add_bos=True)
    tokenizer.chat_template = template
    assert chat_text(tokenizer, chat) == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert chat_ids(tokenizer, chat) == expected


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
def test_equals_transformers_for_the_default_model(chat: list[Message]) -> None:
    try:
        tokenizer = load_tokenizer(resolve("smollm2-135m", offline=True))
    except ModelError:
        pytest.skip("smollm2-135m is not in the cache")
    assert chat_text(tokenizer, chat) == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert chat_ids(tokenizer, chat) == expected


def test_never_two_bos(engine: Engine) -> None:
    tokenizer = make_tokenizer(add_bos=True)
    counts = []
    for template in ("{{ bos_token }}" + CHAT_TEMPLATE, CHAT_TEMPLATE):
        tokenizer.chat_template = template
        ids = encode(tokenizer, say("hello"), 300)
        counts.append(ids.count(BOS))
        assert ids[0] == BOS or counts[-1] == 0
    assert counts == [1, 0]
    # completion text has what the tokenizer does by default, a literal BOS being one more
    assert encode(tokenizer, "hi", 300) == [BOS, *b"hi"]
    assert encode(tokenizer, "<bos>hi", 300) == list(tokenizer("<bos>hi").input_ids)
    messages = say("hello")
    out = engine.generate(messages, SamplingParams(1))
    assert out.stats.prompt_tokens == len(chat_ids(engine.tokenizer, messages))


def test_user_text_is_literal(engine: Engine) -> None:
    text = "{{ 7 * 7 }}{% for x in y %}{{ raise_exception('no') }}"
    assert chat_text(engine.tokenizer, say(text)) == f"<user>{text}\n<assistant>"
    assert engine.generate(say(text), SamplingParams(2)).token_ids


def test_of_several_templates_the_default_counts() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"tool_use": "no", "default": "yes"}
    assert chat_text(tokenizer, say("x")) == "yes"
    tokenizer.chat_template = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert chat_text(tokenizer, say("x")) == "yes"
    for template, words in (
        ({"tool_use": "no", "rag": "no"}, 'none is named "default": rag, tool_use'),
        ([{"name": "x"}, 3], 'none is named "default": x'),
        ({"default": 3}, "must be text, got int"),
        (None, "no chat template"),
        ("", "no chat template"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(RequestError, match=words):
            chat_text(tokenizer, say("x"))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user"}], r"messages\[0\] needs a content that is text, got none"),
        ([{"content": "x"}], r"messages\[0\] needs a role that is text, got none"),
        ([*say("x"), {"role": "", "content": "x"}], r"messages\[1\] needs a role that is not empty"),
        ([{"role": "user", "content": None}], "needs a content that is text, got NoneType"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "needs a content that is text, got list"),
        ([{"role": 3, "content": "x"}], "needs a role that is text, got int"),
        ([{"role": "user", "content": "a\ud800"}], "half a surrogate pair at character 1"),
        ([{"role": "user", "content": "x", "more": object()}], "what JSON can hold"),
        ([{"role": "user", "content": "x" * (MAX_CHARACTERS + 1)}], "at most 4000000 are allowed"),
        ([*say("x"), "y"], "a list of messages"),
        ([{"role": "user", "content": "x"}, 7], "a list of messages"),
        ("a\ud800", "half a surrogate pair at character 1"),
    ],
)
def test_bad_messages_are_one_clear_error(engine: Engine, messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        engine.generate(messages)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)
    assert engine.generate(say("x"), SamplingParams(1)).token_ids


def test_a_refusal_has_the_templates_own_words(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", TEMPLATES["gemma"])
    chat_ids(engine.tokenizer, say("x"))
    process = chat_template.WORKER.process
    with pytest.raises(RequestError, match="Conversation roles must alternate user/assistant"):
        engine.generate([*say("x"), *say("y")])
    assert chat_template.WORKER.process is process, "a refusal costs no process"
    words = "no\\n\\x1b[31m" * 1000
    monkeypatch.setattr(engine.tokenizer, "chat_template", f'{{{{ raise_exception("{words}") }}}}')
    with pytest.raises(RequestError) as caught:
        engine.generate(say("x"))
    assert len(str(caught.value)) < 300 and str(caught.value).isprintable()
