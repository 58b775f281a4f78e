"""`gpuckpt env`."""

from __future__ import annotations

import os
import shlex

import click

from gpuckpt.cli.common import execute, json_option, warn
from gpuckpt.model import Report


@click.command()
@click.option("--vllm", is_flag=True, help="Add what vLLM needs.  [default: NCCL and torch only]")
@json_option
def env(vllm: bool, as_json: bool) -> None:
    """Print the environment that a job on several GPUs must start with, so that its NCCL communicators can be suspended.

    What you have set yourself stays, here or in NCCL's configuration files; where that keeps the job from being suspended, a warning
    says so. Nothing is changed: the lines are for your shell. docs/multi-gpu.md has the reason for each.

    \b
    Examples:
      eval "$(gpuckpt env)"; torchrun --nproc-per-node 2 train.py
      eval "$(gpuckpt env --vllm)"; vllm serve MODEL -tp 2 --disable-custom-all-reduce
      gpuckpt env --json
    """
    execute("env", as_json, lambda: report(vllm), lambda done: show(done, vllm))


def report(vllm: bool) -> Report:
    """The variables to set, under ``details``: those of the settings that have a value in this environment once merged."""
    from gpuckpt.nccl.environment import merged, settings

    environ, warnings = merged(os.environ, for_vllm=vllm)
    wanted = {name: environ[name] for name in settings(for_vllm=vllm) if name in environ}
    chosen = os.environ.get("VLLM_PLUGINS")
    if vllm and chosen is not None and "gpuckpt" not in chosen.split(","):
        warnings.append(f"VLLM_PLUGINS={chosen} keeps vLLM from loading gpuckpt's plugin: add gpuckpt to it, or unset it")
    simulated = bool(os.environ.get("GPUCKPT_SIMULATE"))
    return Report("env", True, simulated, warnings=tuple(warnings), details={"environment": wanted})


def show(done: Report, vllm: bool) -> None:
    for name, value in done.details["environment"].items():
        click.echo(f"export {name}={shlex.quote(value)}")
    if vllm:
        from gpuckpt.nccl.environment import VLLM_FUSION_OPTION, VLLM_OPTION

        fusion = f"where FlashInfer is installed with {VLLM_FUSION_OPTION}"
        warn(f"vLLM must also be started with {VLLM_OPTION}, and {fusion}: options that no variable stands for")
