"""`python -m torchtitan VERB`: the tools around training; each verb loads what it needs and no more."""

import argparse
import sys


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m torchtitan", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    check = verbs.add_parser("check", help="check a configuration as train.py would, without torch")
    check.add_argument("--world_size", type=int, help="ranks the run will have; without it, layouts are not checked")
    check.add_argument("options", nargs="*", help="after --: the options of train.py")

    verbs.add_parser("schema", help="bring train_configs/schema.json and docs/configuration.md up to date")

    from torchtitan.data import prepare

    prepare.add_arguments(verbs.add_parser("prepare", help="tokenise text once, to train from at memory speed"))

    args = parser.parse_args(argv)
    if args.verb == "check":
        from torchtitan.config.load import load_config_or_exit

        load_config_or_exit(args.options, args.world_size, rank=0)
    elif args.verb == "schema":
        from torchtitan.config import export

        export.write_all()
    elif args.verb == "prepare":
        try:
            prepare.run(args)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
