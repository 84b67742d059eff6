"""The command line of launch/ray_serve.py: kernels into the job, a drain that Ray waits for, then serve."""

from __future__ import annotations

import argparse
import logging

from epruntime.cli import main as cli
from epruntime.cli import serve
from epruntime.cli.launch import make_parser
from epruntime.config import ServeConfig
from epruntime.launchers import ray_job, ray_package

logger = logging.getLogger("epruntime.cli.ray_launch")


def main(description: str) -> int:
    """Returns the exit code of the process."""
    parser = make_parser(launcher="ray", description=description, defaults={"ray_address": "auto"})
    parser.set_defaults(run=run)
    return cli.run(parser)


def run(args: argparse.Namespace) -> int:
    try:
        done = ray_package.complete_package()
        if done:
            logger.info("%s", done)
    except ray_package.KernelsMissing as error:
        logger.warning("ranks will run the plain-torch paths, which are slower: the C++ kernels are missing: %s", error)
    _fit_drain(args)
    return serve.run(args)


def _fit_drain(args: argparse.Namespace) -> None:
    """Lets the drain end before `ray job stop` loses patience."""
    longest_s = ray_job.longest_drain_s()
    wanted_s = float(getattr(args, "drain_timeout_s", ServeConfig.drain_timeout_s))
    if longest_s is None or wanted_s <= longest_s:
        return
    args.drain_timeout_s = longest_s
    logger.warning(
        "`ray job stop` kills a job soon after it was asked to end: running requests get %g s and not %g s. For more: "
        'ray job submit --runtime-env-json \'{"env_vars": {"%s": "%d"}}\'',
        longest_s,
        wanted_s,
        ray_job.STOP_WAIT,
        round(wanted_s + 5),
    )
