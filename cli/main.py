"""The `gpuckpt` program: finds the command that was typed and imports nothing else, so that it starts at once."""

from __future__ import annotations

import gc
import importlib
import signal
from typing import Any

import click

from gpuckpt.cli import entry, streams
from gpuckpt.errors import GpuckptError, Interrupted, Unexpected, Usage

#: command -> (module, one line for the list of commands)
COMMANDS = {
    "ps": ("ps", "Every process on the GPUs, or suspended."),
    "suspend": ("suspend", "Move all that processes hold on their GPUs to host memory."),
    "resume": ("resume", "Put suspended processes back on their GPUs."),
    "status": ("status", "How processes are, and what was left in the middle."),
    "is-suspended": ("status", "Exit 0 if suspended, 1 if not."),
    "recover": ("recover", "After a crash: finish or undo what was left in the middle."),
    "exec": ("exec", "Start a program whose suspends shall be quick."),
    "reserve": ("reserve", "Host memory kept ready for a quick first suspend."),
    "run": ("run", "Run a command that is suspended when idle and resumed on demand."),
    "swap": ("swap", "Suspend one, resume another in its place."),
    "lease": ("lease", "A GPU without its runs, for the time of a command."),
    "attach": ("attach", "Resume a run, and suspend it when this is ended."),
    "stop": ("run", "End a run, suspended or not."),
    "doctor": ("doctor", "Can this machine suspend, safely and fast?"),
    "explain": ("explain", "What the code at the end of a message means."),
    "env": ("env", "The environment that a job on several GPUs must start with."),
    "demo": ("demo", "Half a minute that shows it all."),
    "completion": ("completion", "Print a shell completion script."),
}

#: Commands that change nothing.
LOOKS = frozenset({"ps", "status", "is-suspended", "doctor", "explain", "env", "completion"})

EXAMPLES = """
\b
Examples:
  gpuckpt ps                      what is on the GPUs
  gpuckpt suspend 4242            free the GPUs of pid 4242 and all that belongs to it
  gpuckpt resume 4242             let it go on, as if nothing had happened
  gpuckpt run -- vllm serve M     a server that leaves the GPU when idle
  gpuckpt doctor                  can this machine do it?
"""


class Lazy(click.Group):
    """A group that knows its commands by name and imports one when it is used."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run. What the caller hears is what was done, also where nothing can be printed."""
        streams.secure()
        gc.set_threshold(50_000)  # what is imported stays: to look through it again and again takes 5 % of a command
        try:
            return super().main(*args, **kwargs)
        finally:
            streams.settle()

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gpuckpt.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. What click would say in words alone has a document too."""
        words: list[str] = ctx.obj
        as_json = "--json" in words[: words.index("--")] if "--" in words else "--json" in words
        command = next((w for w in words if w in COMMANDS), "")
        try:
            if signal.getsignal(signal.SIGINT) is entry.quit_at_once:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            return super().invoke(ctx)
        except click.UsageError as e:
            if not as_json or not command:
                raise
            from gpuckpt.cli.common import fail

            fail(command, as_json, Usage(e.format_message(), hint=f"gpuckpt {command} --help"), e.exit_code)
        except KeyboardInterrupt:
            error: GpuckptError = Interrupted("interrupted; nothing was touched")
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as e:  # noqa: BLE001 - whatever it is: the exit status and the document must not say what nobody knows
            import traceback

            traceback.print_exc()
            error = Unexpected(
                f"a fault in gpuckpt: {type(e).__name__}: {e}", hint="gpuckpt status, then gpuckpt recover; and report the trace"
            )
        from gpuckpt.cli.common import fail

        return fail(command, as_json, error, 1 if isinstance(error, Unexpected) and command in LOOKS else None)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in COMMANDS.items()])


@click.command(cls=Lazy, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gpuckpt")
def main() -> None:
    """Free a GPU without killing what runs on it.

    Each command takes --json; `gpuckpt COMMAND --help` has examples. Exit codes: 0 done or already so · 1 failed, all as it was
    found · 2 usage · 3 failed, and some process is not as it was found · 4 no such process, or none with CUDA state ·
    5 permission · 6 refused or unsupported · 124 deadline · 130/143 interrupted, all as it was found. `run`, `exec` and `lease` exit
    as their COMMAND does, and with 125, 126 or 127 for what fails of themselves, bad usage included.
    """
