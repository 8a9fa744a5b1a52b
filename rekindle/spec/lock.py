"""`rekindle.lock`, a file beside the config: which digest the tag of an image stands for,
and the hash of the user's own code in that image.

`rekindle images push` writes it, loading a config reads it, and it belongs into version
control as the config does."""

from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from rekindle.errors import SpecError
from rekindle.records import write_atomically
from rekindle.spec.model import Spec
from rekindle.spec.platforms import PlatformsSpec
from rekindle.spec.section import Section
from rekindle.spec.yaml_document import read_document

NAME = "rekindle.lock"
_HEAD = "# what images are, by name: `rekindle images push` writes it; commit it with the config\n"


class Pin(Section):
    """The image that a name stands for."""

    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    """That of its manifest, as the registry reports it."""
    code: str = Field("", pattern=r"^([0-9a-f]{32})?$")
    """Hash of the user's own code in it; empty: it holds none."""


def read(folder: Path) -> dict[str, Pin]:
    """The pins in a folder's lock file, by the image's name in configs; {} without the file.

    SpecError where `rekindle images push` did not write the file."""
    path = folder / NAME
    if not path.exists():
        return {}
    images = read_document(path).values.get("images")
    try:
        if not isinstance(images, dict):
            raise TypeError  # refused below, as images that are not pins are
        return {name: Pin.model_validate(pin) for name, pin in images.items()}
    except (ValidationError, TypeError):
        what = f"{path} is not what `rekindle images push` writes"
        raise SpecError(what, where=str(path), fix="remove it and push again") from None


def write(folder: Path, pins: Mapping[str, Pin]) -> Path:
    """Add these pins to the folder's lock file, in place of older ones of the same name;
    returns its path."""
    merged = read(folder) | dict(pins)
    images = {name: pin.model_dump(mode="json") for name, pin in merged.items()}
    text = yaml.safe_dump({"images": images}, sort_keys=True, width=1_000)
    write_atomically(folder / NAME, _HEAD + text)
    return folder / NAME


def by_digest(name: str, pin: Pin) -> str:
    """`registry/name@sha256:...` for `registry/name:tag`."""
    return f"{repository(name)}@{pin.digest}"


def repository(name: str) -> str:
    """The name without its tag or digest.

    `host:5000/team/image:tag` is `host:5000/team/image`: a colon before the last slash
    belongs to a port."""
    head, slash, last = name.partition("@")[0].rpartition("/")
    return head + slash + last.partition(":")[0]


def pinned(spec: Spec, folder: Path) -> Spec:
    """The spec with each image that the folder's lock file pins named by its digest."""
    pins = read(folder)
    pinned_sections = {}
    for platform in PlatformsSpec.model_fields:
        section = getattr(spec.platforms, platform)
        name = getattr(section, "image", None)
        if name and name in pins:
            image = by_digest(name, pins[name])
            pinned_sections[platform] = section.model_copy(update={"image": image})
    if not pinned_sections:
        return spec
    platforms = spec.platforms.model_copy(update=pinned_sections)
    return spec.model_copy(update={"platforms": platforms})


def code_in(image: str, folder: Path) -> str | None:
    """Hash of the user's own code in an image named by digest; None if no lock file has it."""
    return {by_digest(name, pin): pin.code for name, pin in read(folder).items()}.get(image)
