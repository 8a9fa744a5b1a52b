"""A chat as one text, and which parts of it a model learns to write.

The tokenizer's own template decides the text (Jinja, in the sandbox that transformers
prescribes for it); tokenizers without one get `TEMPLATE`. An answer begins where the
template's prompt for it ends, and ends with what the template puts behind it, such as the
end-of-text token. What that is shows a chat with a word in the answer's place that stands
nowhere else: an answer's own text may occur in the template's (`d` in `<|im_end|>`). A
template that asks for today's date gets `_DATE`, because the same chats must give the
same tokens every day."""

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

# of a word that no text holds; upper case first, as `capitalize` leaves it
_WORD = "Qzjxkvwq"
# chats that show what stands behind an answer; the first that a template takes counts
_PROBES = (
    ("user", "assistant", "user", "assistant"),
    ("system", "user", "assistant", "user", "assistant"),
    ("user", "assistant"),
    ("system", "user", "assistant"),
)

Turn = tuple[str, str]
Span = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Ending:
    """What stands behind an answer up to the next turn: characters `start` to `end` of
    `text`, a whole chat."""

    text: str
    start: int
    end: int


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
        """The chat up to its last answer, and where the answers stand, in characters.

        `ends`: what stands behind answers and holds a token that stops the writing; an
        answer without any of them gets the end-of-text token. None: answers end as the
        last one does. Raises DataError for a chat that the template refuses or whose
        answers it alters."""
        answers = [i for i, (role, _) in enumerate(turns) if role == "assistant"]
        turns = turns[: max(answers) + 1]
        text = self._render(turns)
        behind = {i: self._behind(turns, i) for i in answers}
        if ends is not None:
            return self._with_ends(text, turns, behind, ends)
        last_ending = behind[answers[-1]]
        spans = list[Span]()
        for i in answers:
            start, end = self._answer(text, turns, i, behind[i])
            if behind[i].startswith(last_ending):
                end += len(last_ending)
            spans.append((start, end))
        return text, spans

    def endings(self) -> list[Ending]:
        """What stands behind an answer that another turn follows, and behind a last one,
        as chats of this module show it. Raises DataError where the template refuses all
        of them."""
        refusals = list[DataError]()
        for roles in _PROBES:
            # a content of its own for each turn, by which it is found
            turns = [(role, f"{_WORD}{'abcde'[i]}") for i, role in enumerate(roles)]
            try:
                text = self._render(turns)
            except DataError as refusal:
                refusals.append(refusal)
                continue
            return self._endings(text, turns)
        raise refusals[0]

    def _endings(self, text: str, turns: Sequence[Turn]) -> list[Ending]:
        contents = [content for _, content in turns]
        places = [text.find(content) for content in contents]
        if min(places[-2:]) < 0:
            raise _altered(len(turns))
        starts = [place + len(content) for place, content in zip(places, contents, strict=True)]
        last = Ending(text, starts[-1], len(text))
        if turns[-3:-2] != [("assistant", contents[-3])] or min(places) < 0:
            return [last]
        # from the first answer to the next turn's
        # content: the answer's end, the turn's opening
        between = text[starts[-3] : places[-2]]
        first_user = [role for role, _ in turns].index("user")
        opening_length = _common_end(between, text[: places[first_user]])
        # a turn of the system may end as answers do,
        # and is then no part of what opens a user's
        common_length = _common_start(between, text[last.start :])
        length = max(len(between) - opening_length, common_length)
        return [Ending(text, starts[-3], starts[-3] + length), last]

    def _with_ends(
        self, text: str, turns: Sequence[Turn], behind: Mapping[int, str], ends: Sequence[str]
    ) -> tuple[str, list[Span]]:
        """The chat with each answer ended, and the answers with their ends."""
        pieces = list[str]()
        spans = list[Span]()
        copied = 0  # characters of `text` that are in the pieces
        added = 0  # characters that are not of `text`
        for i, behind_answer in behind.items():
            start, end = self._answer(text, turns, i, behind_answer)
            matching_ends = [known_end for known_end in ends if behind_answer.startswith(known_end)]
            own_end = max(matching_ends, key=len, default="")
            added_end = "" if own_end else self._special_tokens["eos_token"]
            pieces += [text[copied:end], added_end]
            spans.append((start + added, end + added + len(own_end) + len(added_end)))
            copied = end
            added += len(added_end)
        pieces.append(text[copied:])
        return "".join(pieces), spans

    def _answer(self, text: str, turns: Sequence[Turn], index: int, behind: str) -> Span:
        """Where an answer stands, without what the template puts `behind` it."""
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
        content = content.strip()  # as many templates do
        if not text.endswith(behind) or not text[len(prompt) : end].rstrip().endswith(content):
            raise _altered(index + 1)
        return len(prompt), end

    def _behind(self, turns: Sequence[Turn], index: int) -> str:
        """All that stands behind an answer."""
        word = _WORD
        while any(word in content for _, content in turns):
            word += "q"
        text = self._render([*turns[:index], ("assistant", word), *turns[index + 1 :]])
        _, separator, behind = text.partition(word)
        if not separator or word in behind:
            raise _altered(index + 1)
        return behind

    def _render(self, turns: Sequence[Turn], *, add_generation_prompt: bool = False) -> str:
        from jinja2 import TemplateError

        # the names that transformers gives to templates
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            # transformers gives these, so a template may ask whether they are none
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
