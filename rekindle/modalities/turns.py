"""The turns of a document: those of a chat, a prompt and its completion, or one text."""

from collections.abc import Mapping

Turn = tuple[str, str]
"""Role and content."""
ROLES = ("system", "user", "assistant")
"""Those of a chat; a prompt has the role `prompt`, its answer `completion`, a plain text `text`."""
ROLE_OF_FORM = {"text": "text", "completion": "prompt", "chat": "user"}
"""The role of a text that asks a model alone, by the form of documents that it was trained on."""
_ANSWERS = ("assistant", "completion")
_SHAREGPT = {"human": "user", "gpt": "assistant"}  # what it calls them


def prompt_of(turns: list[Turn]) -> list[Turn]:
    """The turns of a document that a server of its model is given."""
    answers = [i for i, (role, _) in enumerate(turns) if role in _ANSWERS]
    return turns[: answers[-1]] if answers else turns


def with_roles(value: object) -> object:
    """A list of ShareGPT's turns as `{role, content}`; all else as it is."""
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        return value
    if any(keys_with_value(turn) != {"from", "value"} for turn in value):
        return value
    turns = []
    for turn in value:
        role = str(turn["from"])
        turns.append({"role": _SHAREGPT.get(role, role), "content": turn["value"]})
    return turns


def keys_with_value(turn: Mapping[str, object]) -> set[str]:
    """The keys of a turn with a value: Arrow gives every turn the keys of all of them."""
    return {key for key, value in turn.items() if value is not None}
