"""`gpuckpt run` and `gpuckpt stop`."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import shutil
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import click

from gpuckpt import errors
from gpuckpt.cli import completing
from gpuckpt.cli.common import FAILED, Duration, Size, Wrapper, execute, fail, finish, json_option
from gpuckpt.cli.reserve import reserve_option, words_of
from gpuckpt.model import ACCEPTABLE_HAZARDS, Report

if TYPE_CHECKING:
    from gpuckpt.supervisor import vllm
    from gpuckpt.supervisor.places import Place
    from gpuckpt.supervisor.supervise import Options

WITHOUT = ("gate", "dev-mode", "sleep-mode", "custom-all-reduce", "nccl", "agent", "fusion", "preload")


#: What a run says of its adapter.
TAKEN_FOR = {
    "vllm": "the command is taken for vllm serve",
    "url": "the command is another server, by its URL",
    "none": "the command is not taken for a server: no gate, it is suspended and resumed by name (--adapter vllm, if it is a vllm serve)",
}


@click.command(cls=Wrapper, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND [ARGS]...")
@click.option("--name", help="What suspend, resume, status and stop call it; not all digits. [default: from the command]")
@click.option("--idle", "idle_s", type=Duration(), metavar="DURATION", help="Suspend after this long without a request. [default: never]")
@click.option(
    "--drain", "drain_s", type=Duration(), default="30s", show_default=True, help="How long a suspend waits for running requests."
)
@click.option(
    "--hold", "hold_s", type=Duration(), default="50s", show_default=True, help="How long a request waits for a resume, then 503."
)
@click.option("--max-waiting", type=click.IntRange(1), default=1000, show_default=True, help="Requests that may wait; 429 beyond.")
@click.option("--grace", "grace_s", type=Duration(), default="10s", show_default=True, help="From SIGTERM to SIGKILL when it is stopped.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Duration(),
    metavar="DURATION",
    help="Of each suspend and each resume. [default: 60s and 2s for each GiB]",
)
@click.option("--adapter", type=click.Choice(["auto", "vllm", "none"]), default="auto", show_default=True, help="How the command serves.")
@click.option("--without", multiple=True, type=click.Choice(WITHOUT), help="Leave out one of the changes. Repeatable.")
@click.option("--upstream", metavar="URL", help="Of another HTTP server: where it listens.")
@click.option("--health", default="/health", show_default=True, metavar="PATH", help="With --upstream: answers 200 when it can serve.")
@click.option("--listen", metavar="[HOST:]PORT", help="Where the gate listens. [default: vllm's --host and --port; 127.0.0.1:8000]")
@click.option(
    "--rehearse/--no-rehearse", default=None, help="One suspend and resume before it is ready. [default: with several CUDA processes]"
)
@click.option("--probe", is_flag=True, help="vLLM: compare a golden answer after each resume, before held requests are let in.")
@click.option("--share", is_flag=True, help="Share its GPUs with other runs: ask idle ones to leave, and leave when asked.")
@click.option("--pin", is_flag=True, help="Never leave the GPU for another run or a lease.")
@click.option(
    "--least-awake",
    "least_awake_s",
    type=Duration(),
    default="2s",
    show_default=True,
    help="With --share: stay at least this long, five times as long while requests come.",
)
@click.option(
    "--host-budget",
    "host_budget_bytes",
    type=Size(),
    metavar="SIZE",
    help="Host memory that all your runs together may hold while suspended. [default: what is available]",
)
@click.option(
    "--restart",
    type=click.Choice(["no", "on-failure"]),
    default="no",
    show_default=True,
    help="Start the command again, five times in a row.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of what this program logs.")
@click.option(
    "--keep", type=click.Choice(["kv_cache"]), help="vLLM: keep the prefix cache too; the driver copies all of it, which is slower."
)
@click.option("--hold-comments", "comments_s", type=Duration(), metavar="DURATION", help="Send held streams an SSE comment this often.")
@click.option("--admin", metavar="HOST:PORT", help="Where vLLM's /sleep, /wake_up and /is_sleeping suspend and resume the run.")
@click.option("--admin-token-file", metavar="FILE", help="With --admin: holds the bearer token; readable by its owner only.")
@click.option(
    "--keep-in",
    default="ram",
    show_default=True,
    metavar="DIR",
    help="While it is suspended, keep what was on the GPUs in a file in DIR instead of in host memory; "
    "ram,DIR: only once another run needs the host memory. It takes the preload library.",
)
@reserve_option
@click.option("--keep-child", is_flag=True, help="Should this supervisor be killed, leave the command alive.")
@click.option("--accept-loss", multiple=True, type=click.Choice(ACCEPTABLE_HAZARDS), metavar="KIND", help="As of suspend. Repeatable.")
@click.option("--dry-run", is_flag=True, help="Print the final command and what is added to its environment. Starts nothing.")
@json_option
def run(
    command: tuple[str, ...],
    name: str | None,
    idle_s: float | None,
    drain_s: float,
    hold_s: float,
    max_waiting: int,
    grace_s: float,
    timeout_s: float | None,
    adapter: str,
    without: tuple[str, ...],
    upstream: str | None,
    health: str,
    listen: str | None,
    rehearse: bool | None,
    probe: bool,
    share: bool,
    pin: bool,
    least_awake_s: float,
    host_budget_bytes: int | None,
    restart: str,
    log_format: str,
    keep: str | None,
    comments_s: float | None,
    admin: str | None,
    admin_token_file: str | None,
    keep_in: str,
    reserve: int | None,
    keep_child: bool,
    accept_loss: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run COMMAND as a supervised child that can be suspended by name, by itself when idle, and is resumed by the next request.

    Stays in the foreground and exits as COMMAND does; 125 if gpuckpt itself fails, bad usage included; 126 if COMMAND cannot be run,
    127 if it is not found. In front of `vllm serve` (found by itself) it listens on vLLM's --host and --port. Other servers:
    --upstream. If this process dies, all that it started dies with it.

    \b
    Examples:
      gpuckpt run --idle 10m -- vllm serve Qwen/Qwen3-8B --port 8000
      gpuckpt run --dry-run -- vllm serve Qwen/Qwen3-8B
      gpuckpt run --name train -- python train.py
      gpuckpt run --upstream http://127.0.0.1:9000 --listen 8000 -- python server.py --port 9000
    """
    try:
        from gpuckpt.supervisor.supervise import Options
    except ImportError as e:
        fail_to_run(as_json, errors.Usage(f"{e.name} is not installed, and a run needs it", hint="pip install 'gpuckpt[serve]'"))
    from gpuckpt.supervisor import adopt, clients, places, vllm
    from gpuckpt.supervisor.admin import read_token
    from gpuckpt.supervisor.model import Policy
    from gpuckpt.supervisor.share import Sharing

    try:
        called = name or places.name_for(list(command))
        if not places.is_name(called):
            raise errors.Usage(f"{called!r} cannot be a name: letters, digits, '.', '_', '-', at most 32, not all digits")
        clients.refuse(command)
        kind = _adapter(adapter, upstream, command)
        if bool(admin) != bool(admin_token_file):
            raise errors.Usage("--admin and --admin-token-file belong together")
        if keep and kind != "vllm":
            raise errors.Usage(f"--keep {keep} is about vLLM's cache, and this command is not vLLM's", hint="--adapter vllm, if it is")
        if probe and (kind != "vllm" or "gate" in without):
            raise errors.Usage("--probe asks vLLM through the gate; this command has none")

        def prepare(socket: str) -> tuple[vllm.Prepared, Options]:
            prepared = vllm.Prepared(command, {}, gate=kind == "url")
            if kind == "vllm":
                prepared = vllm.prepare(command, os.environ, socket, without)
            if "preload" not in without:
                prepared = _with_library(prepared, reserve)
            if reserve is not None and "reserve" not in prepared.changes:
                prepared = dataclasses.replace(
                    prepared, warnings=(*prepared.warnings, "--reserve does nothing without the preload library")
                )
            rehearsed = rehearse if rehearse is not None or prepared.gate else False  # without a gate nobody knows when it is ready
            first, later = ("ram", keep_in[4:]) if keep_in.startswith("ram,") else (keep_in, "")
            method = "driver" if keep else "auto"  # its own allocator would drop the cache
            policy = Policy(drain_s, grace_s, timeout_s, frozenset(accept_loss), rehearsed, probe, first, later, method)
            if keep_in != "ram":
                _check_place(later or first, prepared)
            if not prepared.gate:
                _refuse_without_gate(kind, idle=idle_s, listen=listen, hold_comments=comments_s, share=True if share and not pin else None)
            sharing = Sharing(share, pin, least_awake_s)
            where = _listen(listen, prepared, kind)
            return prepared, Options(
                called,
                kind,
                upstream or "",
                health,
                where,
                idle_s,
                hold_s,
                max_waiting,
                keep_child,
                policy,
                sharing,
                host_budget_bytes,
                restart == "on-failure",
                comments_s,
                _address(admin, "--admin") if admin else None,
                read_token(admin_token_file) if admin and admin_token_file else "",
                keep == "kv_cache",
                command,
            )

        if dry_run:
            planned = prepare(str(places.runtime_directory() / f"{called}.XXXXXXXX" / "http.sock"))
            execute("run", as_json, lambda: _plan(*planned), _show_plan)
        prepare("checked before anything is taken")
        if noted := places.orphan_facts(called):
            adopt.check_command(noted, list(command), called)
        with places.Place(called) as place:
            prepared, options = prepare(str(place.upstream))
            if "reserve" in prepared.changes and (reserve or kind != "vllm"):
                from gpuckpt import follow

                follow.start(reserve or None)
            code = _supervise(prepared, options, place, log_format)
    except errors.GpuckptError as e:
        fail_to_run(as_json, e)
    finish(code)


@click.command()
@click.argument("name", metavar="NAME", shell_complete=completing.names)
@click.option(
    "--timeout", "timeout_s", type=Duration(), default="60s", show_default=True, metavar="DURATION", help="Give up after this long."
)
@json_option
def stop(name: str, timeout_s: float, as_json: bool) -> None:
    """End the run NAME in order: TERM, a moment of grace, KILL. A suspended one is ended without being restored.

    \b
    Examples:
      gpuckpt stop Qwen3-8B
    """

    def body() -> Report:
        from gpuckpt.cli.common import ask_run

        return ask_run(name, "stop", timeout_s=timeout_s)

    execute("stop", as_json, body, lambda _: click.echo(f"stopped: {name}"))


def fail_to_run(as_json: bool, error: errors.GpuckptError) -> NoReturn:
    """Say why, and exit with what is ours among the exit codes of a program that runs another."""
    fail("run", as_json, error, status=error.status if isinstance(error, errors.CannotStart) else FAILED)


def _refuse_without_gate(kind: str, **given: object) -> None:
    """Raise for an option that goes by requests where none come by us: it would be suspended at work, and nothing would bring it back."""
    option = next((f"--{o.replace('_', '-')}" for o, value in given.items() if value is not None), "")
    if option:
        why, otherwise = "the command is not taken for a server", "--adapter vllm, if it is a vllm serve; --upstream URL for another server"
        if kind == "vllm":
            why, otherwise = "its gate was left out", "leave --without gate out"
        words = f"{option} goes by the requests that come, and here none would come by gpuckpt: {why}; nothing was started"
        raise errors.Usage(words, hint=f"{otherwise}; or gpuckpt suspend NAME by hand")


def _supervise(prepared: vllm.Prepared, options: Options, place: Place, log_format: str) -> int:
    import asyncio

    from gpuckpt.supervisor import logs
    from gpuckpt.supervisor.supervise import supervise

    logging.basicConfig(level=logging.INFO, handlers=[logs.handler(options.name, log_format)])
    logging.raiseExceptions = False  # a log that cannot be written is no reason for anything
    log = logging.getLogger("gpuckpt.run")
    for text in prepared.warnings:
        log.warning("%s", text)
    log.info("%s", TAKEN_FOR[options.adapter])
    for what in prepared.changes.values():
        log.info("changed: %s", what)
    return asyncio.run(supervise(options, prepared, place))


def _adapter(chosen: str, upstream: str | None, command: tuple[str, ...]) -> str:
    from gpuckpt.supervisor import vllm

    if upstream:
        if chosen == "vllm":
            raise errors.Usage("--upstream is for other servers than vLLM; leave one of the two out")
        if not _is_url(upstream):
            raise errors.Usage(f"--upstream {upstream} is no URL such as http://127.0.0.1:9000")
        return "url"
    if chosen == "auto":
        return "vllm" if vllm.recognise(command) else "none"
    return chosen


def _is_url(text: str) -> bool:
    try:
        at = urlsplit(text)
        return at.scheme == "http" and bool(at.hostname) and (at.port or 80) > 0
    except ValueError:
        return False


def _listen(text: str | None, prepared: vllm.Prepared, kind: str) -> tuple[str, int]:
    if text is None:
        return (prepared.host, prepared.port) if kind == "vllm" else ("127.0.0.1", 8000)
    return _address(text, "--listen")


def _address(text: str, option: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise errors.Usage(f"{option} {text} is no [HOST:]PORT, such as 127.0.0.1:8000")
    return host.strip("[]") or "127.0.0.1", int(port)


def _with_library(prepared: vllm.Prepared, nbytes: int | None) -> vllm.Prepared:
    """*prepared*, with the preload library, where it is there and wanted; and with memory kept ready (0: as much as an image takes)."""
    from gpuckpt.image import preload, reserve

    if why := preload.problem():
        wanted = os.environ.get(preload.VARIABLE) != "0"
        return dataclasses.replace(prepared, warnings=(*prepared.warnings, f"preload library off: {why}") if wanted else prepared.warnings)
    ours = preload.environment()["LD_PRELOAD"]
    changes = {**prepared.changes, "preload": "LD_PRELOAD: suspends take less time"}
    environ = {**prepared.environ, "LD_PRELOAD": ours}
    if nbytes is not None:
        environ = reserve.environment(environ, auto=not nbytes)
        changes["reserve"] = f"{reserve.VARIABLE}: {words_of(nbytes)} of host memory are kept ready in each process that uses a GPU"
    return dataclasses.replace(prepared, environ=environ, changes=changes)


def _check_place(directory: str, prepared: vllm.Prepared) -> None:
    """What would refuse every suspend is refused before anything is started."""
    if "preload" not in prepared.changes:
        raise errors.Usage("--keep-in takes the preload library, and it is off; nothing was started", hint="gpuckpt doctor")
    from gpuckpt.image import preload

    if not preload.populates():
        raise errors.Usage("--keep-in takes Linux 5.14 or newer; nothing was started", hint="gpuckpt doctor")
    if not (os.path.isdir(directory) and os.access(directory, os.W_OK)):  # noqa: PTH112
        raise errors.Usage(f"--keep-in {directory}: no directory that can be written; nothing was started")


def _plan(prepared: vllm.Prepared, options: Options) -> Report:
    from gpuckpt.supervisor import cache

    details: dict[str, Any] = {
        "dry_run": True,
        "name": options.name,
        "adapter": options.adapter,
        "command_line": list(prepared.command),
        "environment": prepared.environ,
        "changes": prepared.changes,
        "listen": "{}:{}".format(*options.listen) if prepared.gate else None,
        "keep": None,
    }
    if options.keeps_cache:
        details["keep"] = cache.foreseen({**os.environ, **prepared.environ}, prepared.gpu_count, options.policy.timeout_s)
    program = prepared.command[0]
    missing = () if shutil.which(program) else (f"{program} is not here, or cannot be run: without --dry-run this would not start",)
    warnings = (*prepared.warnings, *missing)
    return Report("run", True, bool(os.environ.get("GPUCKPT_SIMULATE")), warnings=warnings, details=details)


def _show_plan(report: Report) -> None:
    d = report.details
    for name, value in d["environment"].items():
        click.echo(f"{name}={value}")
    click.echo(shlex.join(d["command_line"]))
    for name, what in d["changes"].items():
        click.echo(f"  {name}: {what}" + (f"  (leave out with --without {name})" if name in WITHOUT else ""))
    if d["keep"]:
        click.echo(f"  keep kv_cache: {d['keep']['words']}")
    click.echo(f"name {d['name']}, adapter {d['adapter']}, " + (f"gate on {d['listen']}" if d["listen"] else "no gate"))
    click.echo(TAKEN_FOR[d["adapter"]])
