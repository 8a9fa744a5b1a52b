"""`rekindle completion SHELL`: prints the script that completes commands and options."""

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from rekindle.errors import RequestError

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_REKINDLE_COMPLETE"
_LINES = {
    "bash": 'eval "$(rekindle completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(rekindle completion zsh)"  # in ~/.zshrc, after compinit',
    "fish": "rekindle completion fish | source  # in ~/.config/fish/config.fish",
}


@click.command("completion", epilog="\b\n" + "\n".join(_LINES.values()))
@click.argument("shell", type=click.Choice(SHELLS), required=False)
def command(shell: str | None) -> None:
    """Print the completion script of SHELL (default: that of $SHELL)."""
    from rekindle.cli.main import cli

    shell = shell or Path(os.environ.get("SHELL", "")).name
    found = get_completion_class(shell)
    if found is None:
        raise RequestError(
            f"there is no completion for `{shell}`" if shell
            else "cannot detect the shell: $SHELL is not set", where="SHELL",
            fix=f"name one of {', '.join(SHELLS)}",
        )  # fmt: skip
    click.echo(found(cli, {}, "rekindle", VARIABLE).source())
