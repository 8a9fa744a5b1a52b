"""The command line inside this process: what a command says and answers, without a second for Python and its imports."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from rekindle.cli.main import invoke


def rekindle(
    *words: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command; raises CalledProcessError where it fails, unless `check` is false."""
    out, err = io.StringIO(), io.StringIO()
    with (
        _as_a_process(env or {}),
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = invoke([str(word) for word in words])
    done = subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
    if check and code:
        print(done.stdout, done.stderr)
        done.check_returncode()
    return done


@contextlib.contextmanager
def _as_a_process(changes: Mapping[str, str]) -> Iterator[None]:
    """With an environment of its own, and with what is logged on stderr."""
    variables, root = dict(os.environ), logging.getLogger()
    handlers, root.handlers = root.handlers, []
    os.environ.update(changes)
    try:
        yield
    finally:
        root.handlers = handlers
        os.environ.clear()
        os.environ.update(variables)
