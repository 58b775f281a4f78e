"""`gpuckpt completion`."""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a SHELL.

    \b
    Examples:
      eval "$(gpuckpt completion bash)"                               in ~/.bashrc
      gpuckpt completion fish > ~/.config/fish/completions/gpuckpt.fish
    """
    from click.shell_completion import get_completion_class

    from gpuckpt.cli.main import main

    cls = get_completion_class(shell)
    assert cls is not None
    click.echo(cls(main, {}, "gpuckpt", "_GPUCKPT_COMPLETE").source())
