"""The options of verbs that reach hosts by ssh."""

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    ssh = parser.add_argument_group("hosts by ssh", "Ctrl-C ends the run on all hosts; docs/fleet/nodes.md tells more")
    ssh.add_argument("--hosts", metavar="FILE", help="a host a line with address= and gpus=, or a nodes.toml")
    ssh.add_argument(
        "--home", default=".torchtitan-recipe", help="folder of a host that is set up (default: %(default)s)"
    )
    ssh.add_argument("--program", help="command of an installed node program, such as 'torchtitan-recipe node'")
    ssh.add_argument("--ssh", default="ssh", metavar="COMMAND", help="such as 'ssh -F FILE' (default: %(default)s)")
