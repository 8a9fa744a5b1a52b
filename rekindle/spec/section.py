"""What every section of the config is made of, and the base of the sections of platforms.

Secrets are named in a config, each in the way of its platform; never their values."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints

from rekindle.errors import Problem, SpecError
from rekindle.masking import name_secret


def _secret(name: str) -> str:
    """From when a config names it, no error and no log shows its value."""
    name_secret(name.removeprefix("env:"))
    return name


SecretReference = Annotated[
    str, StringConstraints(pattern=r"^env:[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_secret)
]
TokenReference = Annotated[
    str,
    StringConstraints(pattern=r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:/\S+)$"),
    AfterValidator(_secret),
]
"""Of a token that may also stand in a file, where it rotates."""
VariableName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), AfterValidator(_secret)
]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, field docstrings kept as
    descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True
    )


@dataclasses.dataclass(frozen=True)
class Needed:
    """Metadata of a setting that nothing goes to the platform without, nor is compiled
    for it where that is what it is needed `to` do; with an `example` of its value."""

    example: str
    to: Literal["compile", "submit"] = "submit"


class PlatformSection(Section):
    """Base of the sections of platforms, which have these two fields."""

    TITLE: ClassVar[str]
    PATH: ClassVar[str]
    ARTIFACT_ROOT_EXAMPLE: ClassVar[str] = ""
    """What `artifact_root` may be, where the shipped pipeline needs one and the platform's
    compiler does not."""

    if TYPE_CHECKING:  # each section has them in an order of its own
        image: str | None
        artifact_root: str

    def uris(self) -> tuple[tuple[str, str], ...]:
        """Fields that hold a URI, with its text, in which a password may hide."""
        return ()

    def problems_of_a_deploying_step(self) -> tuple[Problem, ...]:
        """What keeps a step of the pipeline from deploying there."""
        return ()

    def missing(self, to: Literal["compile", "submit"] = "submit") -> tuple[Problem, ...]:
        """The settings that are needed to do that, and to compile first, and that are empty."""
        problems = []
        for name, needed in self.needed().items():
            if to in (needed.to, "submit") and not getattr(self, name):
                where = f"{self.PATH}.{name}"
                message = f"{self.TITLE} needs `{name}`"
                fix = f"set {where}: {needed.example}"
                code = SpecError.code if needed.to == "compile" else ""
                problems.append(Problem(message, where, fix, code))
        return tuple(problems)

    def refuse_if_incomplete(self) -> None:
        """SpecError with all that is `missing`, if anything is."""
        if problems := self.missing():
            raise SpecError(problems)

    @classmethod
    def needed(cls) -> dict[str, Needed]:
        """The settings that are needed, by name."""
        needed = {}
        for name, field in cls.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, Needed):
                    needed[name] = mark
        return needed
