"""A chat as one text, and which parts of it a model learns to write.

The tokenizer's own template decides the text (Jinja, in the sandbox that transformers prescribes
for it); tokenizers without one get `TEMPLATE`. An answer begins where the template's prompt for it
ends, and ends with what the template puts behind it, such as the end-of-text token. A template that
asks for today's date gets `_DATE`, because the same chats must give the same tokens every day."""

import datetime as dt
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rekindle.errors import DataError

if TYPE_CHECKING:
    import jinja2

ROLES = ("system", "user", "assistant")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_DATE = dt.datetime(2024, 7, 26, tzinfo=dt.UTC)

Turn = tuple[str, str]
Span = tuple[int, int]


class ChatTemplate:
    """One template with the tokenizer's special tokens, such as `{"eos_token": "</s>"}`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _compiled(source)
        self._special_tokens = special_tokens

    def prompt(self, turns: Sequence[Turn]) -> str:
        """The chat up to where the next answer begins."""
        return self._render(turns, add_generation_prompt=True)

    def render(self, turns: Sequence[Turn]) -> tuple[str, list[Span]]:
        """The chat up to its last answer, and where the answers stand, in characters. Raises
        DataError for a chat that the template refuses or whose answers it alters."""
        answers = [i for i, (role, _) in enumerate(turns) if role == "assistant"]
        turns = turns[: max(answers) + 1]
        text = self._render(turns)
        return text, [self._answer(text, turns, i) for i in answers]

    def _answer(self, text: str, turns: Sequence[Turn], index: int) -> Span:
        prompt = self.prompt(turns[:index])
        content = turns[index][1].strip()
        at = text.find(content, len(prompt))
        if not text.startswith(prompt) or at < 0:
            what = f"the chat template alters turn {index + 1}, so that the answer cannot be found"
            fix = "set model.tokenizer to one whose template keeps earlier turns as they are"
            raise DataError(what, fix=fix)
        alone = self._render(turns[: index + 1])
        ending = alone[alone.rfind(content) + len(content) :]
        end = at + len(content)
        return len(prompt), end + len(ending) if text.startswith(ending, end) else end

    def _render(self, turns: Sequence[Turn], *, add_generation_prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            messages = [{"role": role, "content": content} for role, content in turns]
            asked = {"messages": messages, "add_generation_prompt": add_generation_prompt}
            return self._template.render(**asked, **self._special_tokens)
        except (TemplateError, TypeError, ValueError) as error:
            fix = "correct the order of its turns, or set model.tokenizer to another one"
            raise DataError(f"the chat template refuses a chat: {error}", fix=fix) from error


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> "jinja2.Template":
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks answers for other readers; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: "jinja2.parser.Parser") -> "list[jinja2.nodes.Node]":
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = _DATE.strftime
    return environment.from_string(source)
