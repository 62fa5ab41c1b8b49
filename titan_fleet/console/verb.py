"""Opens a page on this machine that shows its devices and every run, live, and starts, stops and compares runs.

    python -m torchtitan console                        http://127.0.0.1:8400, runs below outputs/
    python -m torchtitan console --nodes nodes.toml     also machines that ssh reaches

On loopback it asks for no password. Any other --host needs TLS, and a token of `console token add`.
"""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan.refusal import Refusal

HELP = "open a page that shows machines and runs, and starts and stops runs"
PACKAGES = "nicegui", "sqlalchemy"
HOME = "~/.torchtitan-recipe"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    several: dict[str, Any] = {"action": "append", "default": [], "metavar": "FOLDER"}
    parser.add_argument("--port", type=int, default=8400, help="the port to listen at (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: %(default)s)")
    parser.add_argument("--runs", **several, help="show the runs below this folder; may be repeated (default: outputs)")
    parser.add_argument("--watch", **several, help="also show the runs below this folder; may be repeated")
    parser.add_argument("--nodes", metavar="FILE", help="a nodes.toml or hosts.txt: further machines, reached by ssh")
    node_home: dict[str, Any] = {"default": ".torchtitan-recipe", "metavar": "FOLDER"}
    parser.add_argument("--node-home", **node_home, help="as --home, on machines that are set up here")
    parser.add_argument("--ssh", default="ssh", help="the ssh command with its options (default: %(default)s)")
    links: dict[str, Any] = {"default": "clusters/here.toml", "metavar": "FILE"}
    parser.add_argument("--links", **links, help="shown as a map: the file of `probe --hosts` (default: %(default)s)")
    git: dict[str, Any] = several | {"metavar": "ADDRESS"}
    parser.add_argument("--git", **git, help="runs may use commits of repositories at or below this address, too")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")
    parser.add_argument("--login", action="store_true", help="ask for a token on loopback, too, where others log in")
    parser.add_argument("--certificate", metavar="FILE", help="the TLS certificate, as PEM")
    parser.add_argument("--key", metavar="FILE", help="the key of the certificate, as PEM")
    parser.add_argument("--name", action="append", default=[], help="what browsers call this machine; may be repeated")
    add_state_arguments(parser)


def add_state_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--home", default=HOME, metavar="FOLDER", help="holds code, runs and database (%(default)s)")
    parser.add_argument("--database", metavar="URL", help="SQLAlchemy's URL of another database than SQLite's file")


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    require_packages()
    from titan_fleet.console.database import open_database
    from titan_fleet.console.door.gate import loopback
    from titan_fleet.console.door.people import People

    is_loopback = loopback(args.host)
    if bool(args.certificate) != bool(args.key):
        raise Refusal("--certificate and --key belong together, and one is missing; give both")
    if not is_loopback and not args.certificate:
        raise Refusal(
            f"--host {args.host} can be reached by others, and tokens would be sent in clear; add --certificate and "
            f"--key, or leave --host out and use: ssh -L {args.port}:127.0.0.1:{args.port} THIS_MACHINE"
        )
    for file in filter(None, (args.certificate, args.key)):
        if not Path(file).is_file():
            raise Refusal(f"{file} is no file; name a PEM file")
    engine = open_database(Path(args.home).expanduser(), args.database)
    if needs_login := args.login or not is_loopback:
        People(engine).require_admin()
    from titan_fleet.console.serve import serve

    serve(args, engine, needs_login)


def require_packages() -> None:
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise Refusal(f"the console needs packages that are not installed: python -m pip install {' '.join(missing)}")
