"""What lies under a home, what of it no run needs any more, and how that is removed
beside runs.

Records mention things by name: a cache key, the folder of an artifact, the key of a
training. What a run that stays mentions, stays. A removal holds the lock `runs/.gc`,
which runs share for a moment to note in `runs/<run_id>/uses` what they are about to use,
and looks at all of that once more. Things leave by renames into a folder `.removed`
beside them: a run with its record, which is there whole or not at all; a cache entry
before its artifacts, so that no entry names what is gone. Files are deleted after that.
Killed at any point, a removal leaves only what nothing mentions, for the next one. Links
are not followed, and a folder in which a file system is mounted stays."""

import contextlib
import dataclasses
import datetime as dt
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import fsspec

from rekindle.outputs import HomeItem
from rekindle.platforms.local.store import HomeStore, locked
from rekindle.storage import DEAD_AFTER, storage_of

NAME = re.compile(r"[0-9a-f]{12,}(?:-[0-9a-f]{8})?")
_DRAFT = re.compile(r"\..+\.([0-9a-f]{8}|starting)")
_DRAFT_SECONDS = 3_600
_PIECE_SECONDS = 86_400
_UNUSED = "no run that stays uses it"
_KILLED = "its process was killed"


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A kind of things under a home: the `patterns` of their places, `why` they may go,
    and the `lock` that a process that uses one holds, beside it, by its name."""

    patterns: tuple[str, ...] = ()
    why: str = ""
    lock: str = ""


# in the order of removal: a cache entry before its artifacts
_KINDS: Mapping[str, _Kind] = {
    "run": _Kind(lock="{}/lock"),  # the records say where they lie
    "cache entry": _Kind(("cache/*.json",), _UNUSED),
    "artifact": _Kind(("artifacts/*/*",), _UNUSED),
    "killed attempt": _Kind(("artifacts/*/*.partial",), _KILLED, "{}"),
    "checkpoints": _Kind(("checkpoints/*",), _UNUSED, "{}/.lock"),
    "scores": _Kind(("scores/*",), _UNUSED, "{}/.lock"),
    "piece": _Kind(("pieces/*",), "neither examples nor shards hold it"),
    "fetched model": _Kind(("fetched/*",), "no version with an alias and no deployment has it"),
    "environment": _Kind(("environments/*",), "it is old", "{}.lock"),
    "lock": _Kind(("cache/locks/*",), _UNUSED, "{}"),
    "draft": _Kind(
        (".*", "cache/.*", "cache/last/.*", "runs/.*", "runs/*/.*", "artifacts/*/.*", "fetched/.*"),
        _KILLED,
        "{}",
    ),
    "interrupted removal": _Kind(("*/.removed/*",), "only its files are left"),
}


@dataclasses.dataclass(frozen=True)
class HomeNeeds:
    """What the runs of a home need. `runs`: whether each stays, and why; `used`: the
    names that those which stay mention, `live` those of runs that are alive; `unsure`:
    one that is alive has not recorded yet what it trains; `finished`: keys of trainings;
    `elsewhere`: folders of checkpoints outside of the home that may go, and why; `days`
    for which environments stay; `served` the digests of models that a registry or a
    deployment names, None where one of these gives no answer."""

    runs: Mapping[str, tuple[bool, str]]
    used: frozenset[str]
    live: frozenset[str]
    unsure: bool
    finished: frozenset[str]
    elsewhere: Mapping[str, str]
    days: int
    served: frozenset[str] | None = None


def survey(home: Path, needs: HomeNeeds) -> Iterator[HomeItem]:
    """All that a removal looks at, with the size of what may go."""
    for run_id, (stays, why) in needs.runs.items():
        yield _item(home, "run", home / "runs" / run_id, stays, why)
    used = set(needs.used)
    for kind, facts in _KINDS.items():
        paths: list[Path] = []
        for pattern in facts.patterns:
            paths += home.glob(pattern)
        for path in sorted(paths):
            if not _is_of_kind(kind, path):
                continue
            if kind == "fetched model":
                stays, why = _is_served(path.name.partition("-")[0], needs)
            else:
                stays, why = _judged(kind, path, needs, used)
            yield _item(home, kind, path, stays, why or facts.why)
            # what an entry that stays names is needed by the run that needs the entry
            if stays and kind == "cache entry" and path.is_file():
                used.update(NAME.findall(path.read_text(errors="replace")))
    for uri, why in needs.elsewhere.items():
        yield from _elsewhere(uri, why)


def remove(
    home: Path, look: Callable[[], Iterator[HomeItem]], shown: Sequence[HomeItem]
) -> list[HomeItem]:
    """Remove those of `shown` that by `look` still may go; all with what came of it."""
    shown_items = {(item.kind, item.path) for item in shown}
    results: list[HomeItem] = []
    with HomeStore(home).removal():
        items = [item for item in look() if (item.kind, item.path) in shown_items]
        for item in items:
            update: dict[str, object] = {}
            may_go = not item.stays and not _is_elsewhere(item)
            if may_go and not _take_away(home / item.path, item.kind):
                update = {"stays": True, "why": "a process uses it"}
            results.append(item.model_copy(update=update))
    # without the lock: what is there now is mentioned nowhere
    for folder in home.glob("*/.removed"):
        if folder.resolve() == folder:
            shutil.rmtree(folder, ignore_errors=True)
    for number, item in enumerate(results):
        if not item.stays and _is_elsewhere(item):
            try:
                storage_of(item.path).remove("", first="manifest.json")
            except Exception as error:  # noqa: BLE001 - drivers raise their SDK's own errors
                why = f"it cannot be deleted from here: {type(error).__name__}"
                results[number] = item.model_copy(update={"stays": True, "why": why})
    return results


def _take_away(path: Path, kind: str) -> bool:
    """Take it from its place; False where a process holds it."""
    with contextlib.ExitStack() as stack:
        lock = _lock(kind, path)
        if lock:
            with contextlib.suppress(FileNotFoundError):
                if not stack.enter_context(locked(lock, create=False)):
                    return False
        folder = _folder_of(kind, path)
        if folder.is_dir() and folder.parent.name != ".removed":
            top = folder.parent
            if kind in ("artifact", "killed attempt"):  # artifacts/<step>/<key>-<attempt>
                top = top.parent
            trash = top / ".removed"
            trash.mkdir(exist_ok=True)
            folder.rename(trash / uuid.uuid4().hex)
        if not path.is_dir():
            path.unlink(missing_ok=True)
    return True


def _lock(kind: str, path: Path) -> Path | None:
    name = _KINDS[kind].lock
    return path.parent / name.format(path.name) if name else None


def _folder_of(kind: str, path: Path) -> Path:
    """The files themselves, which a killed attempt's path is only the marker of."""
    return path.with_suffix("") if kind == "killed attempt" else path


def _is_of_kind(kind: str, path: Path) -> bool:
    """Whether a path that fits the pattern of a kind is such a thing."""
    if kind == "interrupted removal":
        return True
    if kind == "draft":
        return bool(_DRAFT.fullmatch(path.name))
    if path.parent.name == ".removed":
        return False
    if kind == "artifact" and path.with_name(f"{path.name}.partial").exists():
        return False  # of an attempt that goes on, or a killed attempt
    suffix = {"cache entry": ".json", "killed attempt": ".partial"}.get(kind, "")
    return bool(NAME.fullmatch(path.name.removesuffix(suffix)))


def _judged(kind: str, path: Path, needs: HomeNeeds, used: set[str]) -> tuple[bool, str]:
    """Whether it stays, and why ("": for the reason of its kind)."""
    key = path.name.partition(".")[0]
    if kind in ("draft", "interrupted removal"):
        return kind == "draft" and _age_seconds(path) < _DRAFT_SECONDS, ""
    if kind == "checkpoints" and key not in needs.live:
        if key in needs.finished:
            return False, "its training is finished"
        if needs.unsure and key not in used:
            return True, "a run that is alive has not recorded yet what it trains"
    if kind in ("environment", "piece") and (needs.live or needs.unsure):
        return True, "a run is alive"
    if kind == "piece":
        return _judged_piece(path, key in used)
    if kind == "environment" and _age_seconds(path) < needs.days * 86_400:
        return True, f"it was made less than {needs.days} days ago"
    if key in used and kind != "killed attempt":
        return True, "a run that stays uses it"
    return False, ""


def _judged_piece(path: Path, is_used: bool) -> tuple[bool, str]:
    # an artifact has links to its files
    if is_used or any(file.stat().st_nlink > 1 for file in path.iterdir()):
        return True, "examples or shards hold it"
    if _age_seconds(path) < _PIECE_SECONDS:
        return True, "it is less than a day old"
    return False, ""


def _is_served(digest: str, needs: HomeNeeds) -> tuple[bool, str]:
    """Whether a copy of the model with this digest stays, and why."""
    if needs.served is None:
        return True, "its registry, or a deployment, gives no answer"
    if digest in needs.served:
        return True, "a version with an alias, or a deployment, has it"
    return False, ""


def _item(home: Path, kind: str, path: Path, stays: bool, why: str) -> HomeItem:
    """The item with its size, or with what keeps it from being removed."""
    size = 0
    obstacle = ""
    lock = _lock(kind, path)
    if path.is_symlink() or path.parent.resolve() != path.parent:
        obstacle = "links are not followed"
    elif not stays and lock:
        with contextlib.suppress(OSError), locked(lock, create=False) as is_free:
            if not is_free:
                obstacle = "a process uses it"
    if not stays and not obstacle:
        folder = _folder_of(kind, path)
        with contextlib.suppress(FileNotFoundError):
            stats = [file.lstat() for file in (folder, *folder.rglob("*"))]
            size = sum(stat.st_size for stat in stats)
            if len({stat.st_dev for stat in stats}) > 1:
                obstacle = "another file system is mounted in it"
    return HomeItem(
        kind=kind,
        path=str(path.relative_to(home)),
        bytes=size,
        stays=stays or bool(obstacle),
        why=obstacle or why,
    )


def _is_elsewhere(item: HomeItem) -> bool:
    return item.path.startswith("/") or "://" in item.path


def _elsewhere(uri: str, why: str) -> Iterator[HomeItem]:
    """Checkpoints in a store or on a volume, if there are any."""
    try:
        store, root = fsspec.core.url_to_fs(uri, use_listings_cache=False)
        files = store.find(root, detail=True)
        size = sum(int(file["size"]) for file in files.values())
        dead_since = dt.datetime.now(dt.UTC) - DEAD_AFTER
        # a run of another machine may write there
        stays = any(store.modified(name) > dead_since for name in files)
        if stays:
            why = "it changed less than a day ago"
        if files:
            yield HomeItem(kind="checkpoints", path=uri, bytes=size, stays=stays, why=why)
    except FileNotFoundError:
        return
    except Exception as error:  # noqa: BLE001 - drivers raise their SDK's own errors
        why = f"it cannot be listed from here: {type(error).__name__}"
        yield HomeItem(kind="checkpoints", path=uri, bytes=0, stays=True, why=why)


def _age_seconds(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.lstat().st_mtime
    return 0.0
