"""Makes, lists and revokes the tokens by which people log in to a console; it may run meanwhile.

python -m torchtitan console token add ada --role operator     prints the token, this once
python -m torchtitan console token list
python -m torchtitan console token revoke ada
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from titan_fleet.console.verb import add_state_arguments, require_packages
from torchtitan.refusal import Refusal

HELP = "make, list or revoke the tokens of a console"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("do", choices=["add", "list", "revoke"])
    parser.add_argument("name", nargs="?", help="whose token it is")
    roles = ["viewer", "operator", "admin"]
    may = "a viewer reads; an operator also starts and stops runs; an admin also deletes them and reads the audit log"
    parser.add_argument("--role", choices=roles, default="viewer", help=f"{may} (default: %(default)s)")
    add_state_arguments(parser)


def run(args: argparse.Namespace, _: Sequence[str]) -> None:
    require_packages()
    from titan_fleet.console.database import Audit, open_database
    from titan_fleet.console.door.people import People

    engine = open_database(Path(args.home).expanduser(), args.database)
    people, audit = People(engine), Audit(engine)
    if args.do == "list":
        for row in people.tokens():
            print(f"{row.name:24} {row.role:10} since {time.strftime('%Y-%m-%d', time.localtime(row.created))}")
        return
    if not args.name:
        raise Refusal(f"`console token {args.do}` names nobody; write: console token {args.do} NAME")
    if args.do == "add":
        print(people.add_token(args.name, args.role))
    else:
        people.revoke_token(args.name)
    audit.write("terminal", "", f"token {args.do}", args.name)
