"""What tells the resources of a deployment that rekindle made from those of others.

Names follow from the model, so that an interrupted command finds what it made. A name may
be taken by another's resource, so a mark on it decides: a label, or a tag where the
platform calls it so."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rekindle.errors import RequestError


@dataclasses.dataclass(frozen=True)
class OwnerMark:
    """The label or tag `key`, whose value `owner` stands for the model."""

    kind: Literal["label", "tag"]
    key: str
    owner: str

    @property
    def tags(self) -> dict[str, str]:
        """The mark as a resource carries it."""
        return {self.key: self.owner}

    def is_on(self, tags: Mapping[str, str] | None) -> bool:
        """Whether these labels or tags of a resource hold the mark."""
        return (tags or {}).get(self.key) == self.owner

    def check(self, resource: str, tags: Mapping[str, str] | None, where: str) -> None:
        """RequestError for a resource, as people call it, without the mark."""
        if not self.is_on(tags):
            raise RequestError(
                f"{resource} was not made by rekindle for this model: "
                f"it lacks the {self.kind} {self.key}={self.owner}",
                where=where,
                fix="delete it, or name the model otherwise: register.model_name",
            )
