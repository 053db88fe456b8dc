"""Do chat templates give the prompts that models were trained on, and can a bad one do harm?"""

import pytest

from helios_jax.tokenizer import Tokenizer
from helios_jax.tokenizer.chat import render_chat_template
from helios_jax.tokenizer.spelling import byte_alphabet

HELLO = [{"role": "user", "content": "Hello"}]


def render(template, messages=HELLO, **variables):
    return render_chat_template(template, messages, variables)


def tokenizer_with(template=None):
    return Tokenizer.from_gguf_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": [*byte_alphabet(), "<s>", "</s>", "<eot>"],
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 3],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": 256,
            "tokenizer.ggml.eos_token_id": 257,
            "tokenizer.ggml.eot_token_id": 258,
            **({} if template is None else {"tokenizer.chat_template": template}),
        }
    )


def test_the_environment_is_the_one_templates_are_written_for():
    # Blocks leave no blank lines or indentation behind; loop controls; no HTML escaping.
    template = """{%- for m in messages %}
    {% if m.role == 'system' %}
        {% continue %}
    {% endif %}
{{ m.role }}: {{ m.content }}
{% endfor %}
{{ {'a': '<é>'} | tojson }} {{ [1, 2] | tojson(indent=1) }}"""
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "<b> & 'q'"}]
    assert render(template, messages) == 'user: <b> & \'q\'\n{"a": "<é>"} [\n 1,\n 2\n]'


def test_training_marks_render_as_their_body():
    template = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}"
    )
    assert render(template) == "Hello!"


def test_strftime_now_gives_the_date():
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == len("2024-01-31")


def test_the_tokenizer_supplies_its_special_tokens_and_the_caller_the_rest():
    template = (
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
        "{% if tools %}{{ tools[0].name }}{% endif %}"
        "{% if add_generation_prompt %}>{% endif %}{{ style }}"
    )
    tokenizer = tokenizer_with(template)
    assert tokenizer.apply_chat_template(HELLO) == "<s>Hello</s>>"
    assert tokenizer.apply_chat_template(HELLO, False, style="x") == "<s>Hello</s>x"
    assert tokenizer.apply_chat_template(HELLO, tools=[{"name": "f"}]) == "<s>Hello</s>f>"
    assert tokenizer.apply_chat_template(HELLO, bos_token="") == "Hello</s>>"
    assert tokenizer.apply_chat_template(HELLO, chat_template="{{ bos_token }}") == "<s>"


def test_named_templates_of_a_gguf_file():
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": byte_alphabet(),
        "tokenizer.ggml.merges": [],
        "tokenizer.chat_template.tool_use": "U",
    }
    only_named = Tokenizer.from_gguf_metadata(metadata)
    with pytest.raises(ValueError, match=r"none called 'default' \(it has \['tool_use'\]\)"):
        only_named.apply_chat_template(HELLO)
    both = Tokenizer.from_gguf_metadata(metadata | {"tokenizer.chat_template": "D"})
    assert both.apply_chat_template(HELLO) == "D"
    assert both.apply_chat_template(HELLO, tools=[{"name": "f"}]) == "U"


def test_without_a_template_the_user_is_told_to_give_text():
    with pytest.raises(ValueError, match="none called 'default'.*prompt as text"):
        tokenizer_with().apply_chat_template(HELLO)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_a_tool_call_needs_no_content_and_other_keys_pass():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    answer = {"role": "tool", "content": "4", "tool_call_id": "7"}
    template = "{{ messages[0].tool_calls[0].name }}{{ messages[1].tool_call_id }}"
    assert render(template, [call, answer]) == "f7"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", "messages='Hello': must be a sequence of messages"),
        ([], r"messages=\[\]: must hold at least one"),
        (["Hello"], r"messages\[0\]='Hello': must be a mapping"),
        ([*HELLO, {"content": "x"}], r"messages\[1\]\['role'\]=None: must be a non-empty string"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] is missing"),
        ([{"role": "user", "content": 3}], r"\['content'\]=3: must be a string or a list"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"\[0\]=.*text only"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"\[0\]=.*text only"),
        ([{"role": "user", "content": ["x"]}], r"\['content'\]\[0\]='x'.*text only"),
    ],
)
def test_bad_messages_are_named(messages, message):
    with pytest.raises(ValueError, match=message):
        render("x", messages)


def test_a_template_may_refuse():
    with pytest.raises(ValueError, match="refused the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_syntax_error_is_located():
    with pytest.raises(ValueError, match="syntax error in line 2"):
        render("\n{% if %}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ lipsum.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'other'}) }}",
        "{{ messages[0].pop('role') }}",
    ],
)
def test_the_sandbox_holds(template):
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(ValueError, match="was blocked, it reached outside its sandbox"):
        render(template, messages)
    assert messages == HELLO


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include '/etc/passwd' %}",
        "{{ 1 + 'a' }}",
        "{{ absent.field }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_failing_template_is_a_value_error(template):
    with pytest.raises(ValueError, match="chat template failed with [A-Z]"):
        render(template)
