"""`python -m torchtitan VERB`: the tools around training; each verb loads what it needs and no more."""

import argparse
import importlib
import sys

from torchtitan.refusal import Refusal


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m torchtitan", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    check = verbs.add_parser("check", help="find what would stop a run on this machine, without torch")
    check.add_argument("file", metavar="FILE.toml", nargs="?", help="the configuration (default: what options name)")
    check.add_argument(
        "--world_size", type=int, help="ranks the run will have; without it, what depends on them is not checked"
    )
    check.epilog = "After --: options of train.py."

    verbs.add_parser("schema", help="bring train_configs/schema.json and docs/configuration.md up to date")

    dry = verbs.add_parser("dry_run", help="estimate what each rank would hold and move, without the machines")
    seed = verbs.add_parser("seed_checkpoint", help="save the initial weights as step 0 and train nothing")
    for verb in (dry, seed):
        verb.add_argument("file", metavar="FILE.toml", nargs="?", help="the configuration (default: what options name)")
        verb.epilog = "After --: options of train.py."
    dry.add_argument("--world_size", type=int, help="ranks of the run (default: WORLD_SIZE)")

    compare = verbs.add_parser("compare", help="train two configurations from one seed and compare their losses")
    compare.add_argument("a", metavar="A.toml", help="a configuration")
    compare.add_argument("b", metavar="B.toml", help="another, which should train alike")
    compare.add_argument("--out", default="outputs/compare", help="folder for result and runs (default: %(default)s)")
    compare.add_argument("--steps", type=int, help="only the first steps of both, on the same learning rate curve")
    compare.add_argument("--world_size_a", type=int, help="ranks of A (default: the product of its degrees)")
    compare.add_argument("--world_size_b", type=int, help="ranks of B (default: the product of its degrees)")
    bound = "largest relative difference of %s that counts as alike (default: %%(default)s)"
    compare.add_argument("--loss_bound", type=float, default=1e-5, help=bound % "loss")
    compare.add_argument("--norm_bound", type=float, default=1e-4, help=bound % "gradient norm")
    compare.epilog = "After --: options of train.py, for both."

    checkpoint = "a run folder (its newest checkpoint), a folder step-N, or a download from Hugging Face or Meta"
    dtypes = ("float32", "bfloat16", "float16")
    family = "family of a download whose config.json names none of this recipe's: path/to/file.py:SPEC"
    convert = verbs.add_parser("convert", help="weights from and to Hugging Face, and from Meta's files")
    convert.add_argument("source", metavar="FROM", help=checkpoint)
    convert.add_argument("target", metavar="TO", help="the folder to write, new or empty")
    convert.add_argument(
        "--to", choices=("hf", "torchtitan"), help="form of TO (default: hf for a run, else torchtitan)"
    )
    convert.add_argument("--dtype", choices=dtypes, help="type of the weights in TO (default: that of FROM)")
    convert.add_argument("--shard_gb", type=float, default=5, help="GB of a safetensors file (default: %(default)s)")
    convert.add_argument("--push", metavar="OWNER/NAME", help="then put TO on the hub; a new repository is private")
    assets = "file or folder (default: model.hf_assets_path of the run, or the downloaded folder)"
    convert.add_argument("--tokenizer", help=assets)

    export = verbs.add_parser("export", help="a trained model of your own, as safetensors and a program")
    export.add_argument("checkpoint", metavar="FROM", help="a run folder (its newest checkpoint), or a folder step-N")
    export.add_argument("target", metavar="TO", help="the folder to write, new or empty")
    export.add_argument("--stages", type=int, default=0, help="also write what so many pipeline stages would compute")

    generate = verbs.add_parser("generate", help="continue a text; under torchrun, with tensor parallelism")
    generate.add_argument("--checkpoint", default="outputs", help=f"{checkpoint} (default: %(default)s)")
    prompt = "one text, shown as it grows, or several at once (default: what you type, line after line)"
    generate.add_argument("--prompt", nargs="+", help=prompt)
    generate.add_argument("--max_new_tokens", type=int, default=100, help="most tokens to add (default: %(default)s)")
    temperature = "0 takes the likeliest token, with which a small model soon repeats itself (default: %(default)s)"
    generate.add_argument("--temperature", type=float, default=0.8, help=temperature)
    generate.add_argument("--top_k", type=int, default=0, help="draw from the k likeliest; 0: from all (default)")
    generate.add_argument("--top_p", type=float, default=1.0, help="draw from the likeliest that make up this share")
    generate.add_argument("--seed", type=int, help="the same one draws the same text (default: a new one each time)")
    generate.add_argument("--dtype", choices=dtypes, help="what to compute in (default: as trained, or as downloaded)")
    generate.add_argument("--tokenizer", help=assets)

    for verb in (convert, generate):
        verb.add_argument("--model", help=family)

    evaluate = verbs.add_parser("eval", help="loss and perplexity of stored weights on the data of [validation]")
    evaluate.add_argument("--checkpoint", required=True, help=checkpoint)
    evaluate.add_argument("--model", help=family)
    evaluate.epilog = "After --: options of train.py, over the configuration that the checkpoint was trained with."

    drill = verbs.add_parser("drill", help="break a run in many ways; it must end as if nothing had happened")
    drill.add_argument("--faults", type=int, default=0, help="how many (default: one of each kind that fits)")
    drill.add_argument(
        "--on",
        action="append",
        default=[],
        metavar="RIDE",
        help="the small model on a layout, with a way to save, in a place, such as 'PP 2, async, store'; may be "
        "repeated; all: each of them",
    )
    drill.add_argument("--ranks", type=int, default=2, help="processes of the run (default: %(default)s)")
    drill.add_argument("--seed", type=int, default=0, help="decides which fault comes when (default: %(default)s)")
    drill.add_argument("--minutes", type=float, default=60, help="limit of the whole drill (default: %(default)s)")
    drill.add_argument(
        "--out", default="outputs/drill", help="folder; an earlier drill's is emptied (default: %(default)s)"
    )
    drill.epilog = "After --: options of train.py; without any, a small model is drilled."

    runs = verbs.add_parser("runs", help="list the runs below a folder, or compare two")
    runs.add_argument("folder", nargs="?", default="outputs", help="where to look (default: %(default)s)")
    runs.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two run folders: the keys in which they differ")

    tokenizer = verbs.add_parser("tokenizer", help="train a tokenizer on your text").add_subparsers(required=True)
    train = tokenizer.add_parser("train", help="byte-level BPE")
    train.add_argument("--data", required=True, help="the text: a file, a folder or a quoted glob")
    train.add_argument("--vocab_size", type=int, required=True, help="number of tokens, such as 32000")
    train.add_argument("--out", required=True, help="the folder to write")
    train.add_argument("--text_key", default="text", help="the field that holds the text (default: %(default)s)")
    train.add_argument(
        "--beside", default="tests/assets/tokenizer", help="a tokenizer to compare with (default: %(default)s)"
    )

    from torchtitan.verbs import plan

    plan.add_arguments(verbs.add_parser("plan", help="find the fastest layout of a run, or predict published ones"))

    from torchtitan.verbs import netem

    netem.add_arguments(verbs.add_parser("netem", help="run a command at each site of an emulated network"))

    from torchtitan.launch import submit

    submit.add_arguments(verbs.add_parser("launch", help="submit a run to Slurm, Run:ai, Kubernetes or SkyPilot"))

    flight = verbs.add_parser("preflight", help="check that all nodes of a run can reach each other and are alike")
    flight.epilog = (
        "Run this on each node, with the variables of ./run_llama_train.sh. Everything after -- goes to train.py."
    )

    from torchtitan.verbs import probe

    probe.add_arguments(verbs.add_parser("probe", help="measure devices and links, and write a cluster file"))

    from torchtitan.data import prepare

    prepare.add_arguments(verbs.add_parser("prepare", help="tokenise text once, to train from at memory speed"))

    from torchtitan.verbs import download

    download.add_arguments(verbs.add_parser("download", help="a tokenizer, model or dataset of the Hugging Face hub"))

    # argparse before Python 3.13 finds no place for what follows `--` where positionals and options came before.
    takes_options = argv[:1] in (
        *(
            ["check"],
            ["compare"],
            ["drill"],
            ["dry_run"],
            ["eval"],
            ["launch"],
            ["netem"],
            ["plan"],
            ["preflight"],
            ["seed_checkpoint"],
        ),
    )
    if argv[:1] == ["plan"] and argv[1:2] and argv[1].endswith(".toml"):
        argv = ["plan", "layout", *argv[1:]]
    end = argv.index("--") if takes_options and "--" in argv else len(argv)
    try:
        _run(parser.parse_args(argv[:end]), options=argv[end + 1 :])
    except Refusal as error:
        raise SystemExit(f"error: {error}") from None
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        raise SystemExit(f"error: {error}; check the path, its permissions and the space on its disk") from None


def _run(args: argparse.Namespace, options: list[str]) -> None:
    if args.verb in ("check", "dry_run", "plan", "probe", "seed_checkpoint"):
        importlib.import_module(f"torchtitan.verbs.{args.verb}").run(args, options)
    elif args.verb == "schema":
        from torchtitan.config import export

        export.write_all()
    elif args.verb == "prepare":
        from torchtitan.data import prepare

        prepare.run(args)
    elif args.verb == "download":
        from torchtitan.verbs import download

        download.run(args)
    elif args.verb == "compare":
        from torchtitan.verbs import compare

        raise SystemExit(compare.run(args, options))
    elif args.verb == "drill":
        from torchtitan.verbs import drill

        raise SystemExit(drill.run(args, options))
    elif args.verb == "launch":
        from torchtitan.launch import submit

        raise SystemExit(submit.run(args, options))
    elif args.verb == "netem":
        from torchtitan.verbs import netem

        raise SystemExit(netem.run(args, options))
    elif args.verb in ("runs", "tokenizer"):
        from torchtitan.verbs import runs, tokenizer

        {"runs": runs.run, "tokenizer": tokenizer.run}[args.verb](args)
    elif args.verb == "preflight":
        from torchtitan.preflight import start

        raise SystemExit(not start.check_only(options))
    elif args.verb == "convert":
        from torchtitan.verbs import convert

        convert.run(args)
    elif args.verb == "export":
        from torchtitan.verbs.export import run as run_export

        run_export(args)
    elif args.verb == "generate":
        from torchtitan.verbs import generate

        generate.run(args)
    elif args.verb == "eval":
        from torchtitan.verbs import evaluate

        evaluate.run(args, options)


if __name__ == "__main__":
    main(sys.argv[1:])
