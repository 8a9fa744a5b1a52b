"""Chat templates as tokenizers have them: which part of the text is an answer, and which template is
refused."""

from __future__ import annotations

import pytest

from rekindle.errors import DataError
from rekindle.tasks.chat import TEMPLATE, ChatTemplate

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMED = """
{%- for m in messages %}
  {%- if m.role == 'system' %}{{ raise_exception('no system turn, please') }}{% endif -%}
  [{{ m.role }}] {{ m['content'] | trim }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}[assistant] {% endif %}"""
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ 'A:' }}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ 'Q:' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)
# as Qwen 3 does: the last answer gets an empty thought in front, earlier ones do not
THINKING = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m.content + '</>' }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SHOUTING = "{% for m in messages %}{{ m.role + ':' + m.content | upper }}{% endfor %}"
DATED = "{{ strftime_now('%d %b %Y') }}" + CHATML
TURNS = [("user", "Hi"), ("assistant", " Hello. "), ("user", "Hi"), ("assistant", "Hi")]

# name: (template, the answers as they stand in the text)
ANSWERS = {
    "ours": (TEMPLATE, [" Hello. </s>", "Hi</s>"]),
    "ChatML": (CHATML, [" Hello. <|im_end|>\n", "Hi<|im_end|>\n"]),
    "one that trims": (TRIMMED, ["Hello.</s>\n", "Hi</s>\n"]),
    "one that marks answers itself": (MARKED, [" Hello. </s>", "Hi</s>"]),
    "one that adds to the last answer": (THINKING, [" Hello. </>", "<think></think>Hi</>"]),
    "one with a date": (DATED, [" Hello. <|im_end|>\n", "Hi<|im_end|>\n"]),
}


def template(source):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(("source", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_the_answers_are_what_stands_between_prompt_and_next_turn(source, expected):
    text, spans = template(source).render([*TURNS, ("user", "Bye")])
    assert [text[start:end] for start, end in spans] == expected
    assert "Bye" not in text
    for i, (start, _) in zip((1, 3), spans, strict=True):
        assert text[:start].endswith(template(source).prompt(TURNS[:i])[-5:])


def test_the_text_is_what_transformers_makes_of_it():
    from transformers.utils.chat_template_utils import render_jinja_template

    for source in (TEMPLATE, CHATML, TRIMMED, MARKED, THINKING):
        messages = [{"role": role, "content": content} for role, content in TURNS]
        (theirs,), _ = render_jinja_template(
            conversations=[messages], chat_template=source, bos_token="<s>", eos_token="</s>"
        )
        assert template(source).render(TURNS)[0] == theirs


def test_a_dated_template_gives_the_same_text_every_day():
    assert template(DATED).render(TURNS)[0].startswith("26 Jul 2024")


@pytest.mark.parametrize(
    ("source", "turns", "said"),
    [
        (SHOUTING, TURNS, "alters turn 2"),
        (TRIMMED, [("system", "Be brief."), *TURNS], "no system turn, please"),
        ("{{ messages[0].content.no_such }}{{ undefined_function() }}", TURNS, "refuses a chat"),
        ("{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__() }}", TURNS, "refuses a chat"),
    ],
    ids=["alters answers", "refuses a role", "is broken", "reaches for Python"],
)
def test_a_template_that_cannot_be_learned_from_is_refused(source, turns, said):
    with pytest.raises(DataError, match=said):
        template(source).render(turns)
