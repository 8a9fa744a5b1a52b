"""What images are, by the names that configs have for them: `rekindle.lock`, beside the
config.

`rekindle images push` writes it, loading a config reads it, and it belongs into version
control as the config does. An image is its digest, and with it the hash of the user's own
code in it."""

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
    """What stands behind the name of an image."""

    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    """Of its manifest, as the registry says."""
    code: str = Field("", pattern=r"^([0-9a-f]{32})?$")
    """Hash of the user's own code in it; empty: none."""


def read(folder: Path) -> dict[str, Pin]:
    """The pins of the configs in a folder, by name; SpecError for another kind of file."""
    path = folder / NAME
    if not path.exists():
        return {}
    images = read_document(path).values.get("images")
    try:
        if not isinstance(images, dict):
            raise TypeError
        return {name: Pin.model_validate(pin) for name, pin in images.items()}
    except (ValidationError, TypeError):
        what = f"{path} is not what `rekindle images push` writes"
        raise SpecError(what, where=str(path), fix="remove it and push again") from None


def write(folder: Path, pins: Mapping[str, Pin]) -> Path:
    """The file, with these pins beside or in place of those that were there."""
    merged = read(folder) | dict(pins)
    images = {name: pin.model_dump(mode="json") for name, pin in merged.items()}
    text = yaml.safe_dump({"images": images}, sort_keys=True, width=1_000)
    write_atomically(folder / NAME, _HEAD + text)
    return folder / NAME


def by_digest(name: str, pin: Pin) -> str:
    """`registry/name@sha256:...` for `registry/name:tag`."""
    return f"{repository(name)}@{pin.digest}"


def repository(name: str) -> str:
    """The name without its tag or digest."""
    head, slash, last = name.partition("@")[0].rpartition("/")
    return head + slash + last.partition(":")[0]


def pinned(spec: Spec, folder: Path) -> Spec:
    """The spec with its images by digest, as far as the folder's pins know them."""
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
