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

    compare = verbs.add_parser("compare", help="train two configurations from one seed and compare their losses")
    compare.add_argument("a", metavar="A.toml", help="a configuration")
    compare.add_argument("b", metavar="B.toml", help="another, which should train alike")
    compare.add_argument("--out", default="outputs/compare", help="folder for result and runs (default: %(default)s)")
    compare.add_argument("--steps", type=int, help="only the first steps of both, on the same learning rate curve")
    compare.add_argument("--world_size_a", type=int, help="ranks of A (default: the product of its degrees)")
    compare.add_argument("--world_size_b", type=int, help="ranks of B (default: the product of its degrees)")
    bound = "largest relative difference of %s that is alike (default: %%(default)s)"
    compare.add_argument("--loss_bound", type=float, default=1e-5, help=bound % "loss")
    compare.add_argument("--norm_bound", type=float, default=1e-4, help=bound % "gradient norm")
    compare.epilog = "After --: options of train.py, for both."

    drill = verbs.add_parser("drill", help="break a run in many ways; it must end as if nothing had happened")
    drill.add_argument("--faults", type=int, default=8, help="how many (default: %(default)s)")
    drill.add_argument("--ranks", type=int, default=2, help="processes of the run (default: %(default)s)")
    drill.add_argument("--seed", type=int, default=0, help="of which fault comes when (default: %(default)s)")
    drill.add_argument("--minutes", type=float, default=60, help="longest time for all (default: %(default)s)")
    drill.add_argument("--out", default="outputs/drill", help="folder, emptied first (default: %(default)s)")
    drill.epilog = "After --: options of train.py."

    from torchtitan.data import prepare

    prepare.add_arguments(verbs.add_parser("prepare", help="tokenise text once, to train from at memory speed"))

    # argparse before Python 3.13 finds no place for what follows `--` where positionals and options came before.
    end = argv.index("--") if argv[:1] in (["compare"], ["drill"]) and "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
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
    elif args.verb == "drill":
        from torchtitan import drill as fire_drill

        raise SystemExit(fire_drill.run(args, options=argv[end + 1 :]))
    elif args.verb == "compare":
        from torchtitan.compare import run

        raise SystemExit(run(args, options=argv[end + 1 :]))


if __name__ == "__main__":
    main(sys.argv[1:])
