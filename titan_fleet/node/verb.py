"""`python -m torchtitan node`: what a machine runs that others reach by ssh. It speaks JSON lines, and opens no port.

A key that shall do nothing else gets a line in ~/.ssh/authorized_keys, with these options as its owner wants them:

    command="/path/to/.venv/bin/python -m torchtitan node --home ~/runs",restrict ssh-ed25519 AAAA... console

It reports devices and runs, starts, follows and stops runs, and sends their files; docs/fleet/nodes.md tells more.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_fleet.node.archives import Archives
from titan_fleet.node.folders import Folders
from titan_fleet.node.jobs import Jobs
from titan_fleet.node.program import Program, own_output

HELP = "serve this machine to a console or `launch ssh` over ssh"
HOME = "~/.torchtitan-recipe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    several: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--home", default=HOME, metavar="FOLDER", help="holds code/ and runs/ (default: %(default)s)")
    parser.add_argument(
        "--watch", **several, metavar="FOLDER", help="also show the runs below this folder, read-only; may be repeated"
    )
    parser.add_argument(
        "--git",
        **several,
        metavar="ADDRESS",
        help="jobs may name commits of repositories at or below this address, such as https://host/group; "
        "may be repeated (default: none)",
    )
    parser.add_argument(
        "--env",
        **several,
        metavar="NAME",
        help="jobs may also set this environment variable, beside NCCL_*, GLOO_* and the like; may be repeated",
    )


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    out = own_output()
    home = Path(args.home).expanduser().resolve()
    folders, archives = Folders(home / "runs", [Path(path) for path in args.watch]), Archives(home / "code", args.git)
    program = Program(home, folders, archives, Jobs(folders, archives, args.env), out)
    program.serve(sys.stdin.buffer)
