"""A chat as one text, and which parts of it a model learns to write.

The tokenizer's own template decides the text (Jinja, in the sandbox that transformers
prescribes for it); tokenizers without one get `TEMPLATE`. An answer begins where the
template's prompt for it ends. It ends with what the template puts behind it, such as the
end-of-text token, because a model has to learn to stop.

To find what a template puts behind an answer, a chat is rendered with a word in its place
that occurs nowhere else. The answer itself would not do: it may occur in the template's
text, as `d` does in `<|im_end|>`. A template that asks for today's date gets `_DATE`,
because the same chats must give the same tokens every day."""

import dataclasses
import datetime as dt
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.errors import DataError, first_line

if TYPE_CHECKING:
    import jinja2

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_DATE = dt.datetime(2024, 7, 26, tzinfo=dt.UTC)

# The beginning of words that no text has. Some templates apply `capitalize` to contents,
# which changes nothing in a word with only its first letter in upper case.
_WORD = "Qzjxkvwq"
# The roles of chats that show what a template puts behind answers. The first chat that it
# does not refuse is used: some want a system's turn, some refuse several answers.
_PROBES = (
    ("user", "assistant", "user", "assistant"),
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "assistant"),
    ("system", "user", "assistant"),
)

Turn = tuple[str, str]
"""A role and its content."""
Span = tuple[int, int]
"""The first character of a part of a text, and the one after its last."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a template puts behind an answer, up to the next turn or the end of the chat."""

    text: str
    """A whole chat."""
    start: int
    """Its first character in `text`."""
    end: int
    """The character after its last."""


class ChatTemplate:
    """A template with the tokenizer's special tokens, such as `{"eos_token": "</s>"}`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _compiled(source)
        self._special_tokens = special_tokens

    def prompt(self, turns: Sequence[Turn]) -> str:
        """The chat up to where the next answer begins."""
        return self._render(turns, add_generation_prompt=True)

    def render(
        self, turns: Sequence[Turn], ends: Sequence[str] | None = None
    ) -> tuple[str, list[Span]]:
        """The chat up to its last answer, and the span of each answer with its ending.

        `ends` are endings that hold a token at which a model stops writing; an answer
        that has none of them behind it gets the end-of-text token. With None, what is
        behind the last answer is the ending of all that have it. Raises DataError for a
        chat that the template refuses or whose answers it alters."""
        answers = [i for i, (role, _) in enumerate(turns) if role == "assistant"]
        turns = turns[: max(answers) + 1]
        text = self._render(turns)
        text_behind = {i: self._text_behind(turns, i) for i in answers}
        if ends is not None:
            return self._with_ends(text, turns, text_behind, ends)
        last_ending = text_behind[answers[-1]]
        spans = list[Span]()
        for i in answers:
            start, end = self._answer_span(text, turns, i, text_behind[i])
            if text_behind[i].startswith(last_ending):
                end += len(last_ending)
            spans.append((start, end))
        return text, spans

    def endings(self) -> list[Ending]:
        """The endings of an answer that another turn follows, where the template takes
        such a chat, and of the last answer. Raises DataError where it refuses all of
        `_PROBES`."""
        refusals = list[DataError]()
        for roles in _PROBES:
            # each turn has a content of its own, by which it is found in the text
            turns = [(role, f"{_WORD}{'abcde'[i]}") for i, role in enumerate(roles)]
            try:
                text = self._render(turns)
            except DataError as refusal:
                refusals.append(refusal)
                continue
            return self._endings(text, turns)
        raise refusals[0]

    def _endings(self, text: str, turns: Sequence[Turn]) -> list[Ending]:
        """The endings of answers in `text`, which is what the template made of `turns`."""
        contents = [content for _, content in turns]
        starts = [text.find(content) for content in contents]
        if min(starts[-2:]) < 0:
            raise _altered(len(turns))
        stops = [start + len(content) for start, content in zip(starts, contents, strict=True)]
        last = Ending(text, stops[-1], len(text))
        has_earlier_answer = len(turns) > 2 and turns[-3][0] == "assistant"
        if not has_earlier_answer or min(starts) < 0:
            return [last]
        # Between the earlier answer and the content of the user's turn after it stand the
        # answer's ending and what opens the turn. The opening is what also stands before
        # the first user's content.
        between = text[stops[-3] : starts[-2]]
        first_user = [role for role, _ in turns].index("user")
        opening_length = _common_end(between, text[: starts[first_user]])
        # Where a system's turn stands before that user's, its end may be the same as an
        # answer's, and count to the opening. So the ending is at least what it shares
        # with the last one.
        common_length = _common_start(between, text[last.start :])
        length = max(len(between) - opening_length, common_length)
        return [Ending(text, stops[-3], stops[-3] + length), last]

    def _with_ends(
        self, text: str, turns: Sequence[Turn], text_behind: Mapping[int, str], ends: Sequence[str]
    ) -> tuple[str, list[Span]]:
        """The chat with the end-of-text token behind each answer that has none of `ends`,
        and the spans of the answers with their ends."""
        pieces = list[str]()
        spans = list[Span]()
        copied = 0  # characters of `text` that are in the pieces so far
        added = 0  # characters in the pieces that are not of `text`
        for i, behind in text_behind.items():
            start, end = self._answer_span(text, turns, i, behind)
            matching_ends = [known_end for known_end in ends if behind.startswith(known_end)]
            own_end = max(matching_ends, key=len, default="")
            added_end = "" if own_end else self._special_tokens["eos_token"]
            pieces += [text[copied:end], added_end]
            spans.append((start + added, end + added + len(own_end) + len(added_end)))
            copied = end
            added += len(added_end)
        pieces.append(text[copied:])
        return "".join(pieces), spans

    def _answer_span(self, text: str, turns: Sequence[Turn], index: int, behind: str) -> Span:
        """The span of an answer in `text`, which ends with `behind`, all that is behind it."""
        prompt = self.prompt(turns[:index])
        if not text.startswith(prompt):
            place = _common_start(prompt, text)
            message = (
                f"the chat template opens the answer of turn {index + 1} otherwise in a prompt"
            )
            message += f" ({prompt[place:]!r}) than in a chat ({text[place : place + 20]!r})"
            fix = "set model.tokenizer to one whose prompts are how its chats begin"
            raise DataError(message, fix=fix)
        end = len(text) - len(behind)
        _, content = turns[index]
        content = content.strip()  # many templates strip contents
        if not text.endswith(behind) or not text[len(prompt) : end].rstrip().endswith(content):
            raise _altered(index + 1)
        return len(prompt), end

    def _text_behind(self, turns: Sequence[Turn], index: int) -> str:
        """All that stands behind an answer in the chat, up to its end."""
        word = _WORD
        while any(word in content for _, content in turns):
            word += "q"
        text = self._render([*turns[:index], ("assistant", word), *turns[index + 1 :]])
        _, separator, behind = text.partition(word)
        if not separator or word in behind:
            raise _altered(index + 1)
        return behind

    def _render(self, turns: Sequence[Turn], *, add_generation_prompt: bool = False) -> str:
        """What the template makes of the turns; DataError if it refuses them."""
        from jinja2 import TemplateError

        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            # The names are those that transformers passes. It always passes tools and
            # documents, so templates ask whether they are none, and not whether they are
            # defined.
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program of others, which may raise anything
            reason = first_line(error)
            if not isinstance(error, TemplateError):
                reason = f"{type(error).__name__}: {reason}"
            fix = "correct the order of its turns, or set model.tokenizer to another one"
            raise DataError(f"the chat template refuses a chat: {reason}", fix=fix) from error


def template_in(folder: Path) -> ChatTemplate | None:
    """The template of the tokenizer in a folder, read without transformers; None where it
    has none. Raises DataError for files that cannot be read."""
    config_file = folder / "tokenizer_config.json"
    template_file = folder / "chat_template.jinja"
    try:
        config: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
        source = config.get("chat_template")
        if template_file.is_file():  # as newer versions of transformers save it
            source = template_file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        message = f"the tokenizer cannot be read: {first_line(error)}"
        fix = "save it again, by save_pretrained"
        raise DataError(message, where=str(config_file), fix=fix) from error
    if isinstance(source, list):  # several templates by name
        templates = {template["name"]: template["template"] for template in source}
        source = templates.get("default")
    if not isinstance(source, str):
        return None
    special_tokens = dict[str, str]()
    for name, token in config.items():
        if not name.endswith("_token"):
            continue
        text = token["content"] if isinstance(token, dict) else token
        if isinstance(text, str):
            special_tokens[name] = text
    return ChatTemplate(source, special_tokens)


def _altered(turn: int) -> DataError:
    """The error for a template that alters the content of a turn."""
    message = f"the chat template alters turn {turn}, so that the answer cannot be found"
    fix = "set model.tokenizer to one whose template keeps earlier turns as they are"
    return DataError(message, fix=fix)


def _common_start(a: str, b: str) -> int:
    """How many characters both begin with."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _common_end(a: str, b: str) -> int:
    """How many characters both end with."""
    return _common_start(a[::-1], b[::-1])


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> "jinja2.Template":
    """A template, in the same environment as in transformers."""
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
    try:
        return environment.from_string(source)
    except (TemplateError, RecursionError) as error:
        message = f"the chat template cannot be read: {first_line(error)}"
        fix = "correct it, or set model.tokenizer to another one"
        raise DataError(message, where="model.tokenizer", fix=fix) from error
