"""Which file a row of a source may name: one below the source's root, in its filesystem.

A row is data. Its author must not choose what is read with others' credentials: not
another scheme or bucket, not a chained URI (`a::b`, whose filesystems render templates),
not a path through `..`, a hidden name or a link, also not one that appears between the
check and the reading."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fsspec.implementations.local import LocalFileSystem

MOST_BYTES = 256 << 20
"""What one file that a row names may hold."""
_LONGEST = 4096  # characters, PATH_MAX of Linux
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)


def path_of(filesystem: Any, root: str, folder: str, value: str) -> str:
    """The path of the file that a row in `folder` names as `value`: relative to `folder`,
    absolute, or a URI of the filesystem's own scheme. Raises ValueError for all that is
    not below `root`."""
    if not root:  # all buckets, or the whole disk
        raise ValueError(f"{value!r} cannot be below the source's folder, for it has none")
    if "::" in value or not value.isprintable():
        raise ValueError(f"{value!r} is a chained URI or holds control characters")
    scheme, has_scheme, _ = value.partition("://")
    own_schemes = filesystem.protocol
    if isinstance(own_schemes, str):
        own_schemes = (own_schemes,)
    if has_scheme and scheme not in own_schemes:
        raise ValueError(f"{value!r} is not of the source's own scheme")
    if has_scheme:
        path = str(filesystem._strip_protocol(value))
    elif value.startswith("/"):
        path = value
    else:
        path = f"{folder}/{value}"
    prefix = f"{root.rstrip('/')}/"
    if not path.startswith(prefix):
        raise ValueError(f"{value!r} is not below {root}, where the source lies")
    below = _decoded(path.removeprefix(prefix))
    # `\` is a letter of a name to some servers and a `/` to others
    names = [*below.split("/"), *below.replace("\\", "/").split("/")]
    is_empty = not {*names} - {"", "."}
    is_hidden = any(name.startswith(".") and name != "." for name in names)
    if is_empty or is_hidden:
        raise ValueError(f"{value!r} is empty, or goes through `..` or a hidden name")
    if isinstance(filesystem, LocalFileSystem):
        return _without_links(prefix, path, value)
    return path


def read(filesystem: Any, path: str) -> bytes:
    """The bytes of a file; raises ValueError beyond `MOST_BYTES`."""
    if isinstance(filesystem, LocalFileSystem):
        with open(path, "rb", opener=_open_without_links) as file:
            content = file.read(MOST_BYTES + 1)
    else:
        content = filesystem.cat_file(path, 0, MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} holds more than {MOST_BYTES >> 20} MiB")
    return content


def _open_without_links(path: str, flags: int) -> int:
    """Opens folder by folder, none of which may be a link by now.
    OSError where one is."""
    folder = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    *folders, name = Path(path).parts[1:]
    try:
        for part in folders:
            within = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = within
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)


def _decoded(path: str) -> str:
    """The path as a server may read it: decoded as often as it is encoded."""
    if len(path) > _LONGEST:  # each pass reads all of it
        raise ValueError(f"a name of {len(path):,} characters is not a path")
    while (decoded := unquote(path)) != path:
        path = decoded
    return path


def _without_links(root: str, path: str, value: str) -> str:
    try:
        real = Path(os.path.realpath(path))
        real_root = Path(os.path.realpath(root))
    except OSError as error:
        raise ValueError(f"{value!r} cannot be followed: {error.strerror}") from error
    if not real.is_relative_to(real_root):
        raise ValueError(f"{value!r} is a link that leads out of {root}; copy what it leads to")
    if real.exists() and not real.is_file():  # a pipe would be waited for
        raise ValueError(f"{value!r} is not a file")
    return str(real)
