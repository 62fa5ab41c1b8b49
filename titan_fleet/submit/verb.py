"""`python -m torchtitan launch SITE`: one description of a job, submitted to Slurm, Run:ai, Kubernetes or SkyPilot.

    python -m torchtitan launch k8s --config train_configs/llama3_8b.toml --nodes 2 --gpus 8 --image IMAGE --print
    python -m torchtitan launch ssh --hosts hosts.txt --config train_configs/llama3_8b.toml

The job runs run_llama_train.sh on each node. This verb installs and builds nothing; the site's own client submits.
Only `ssh` needs no site: it sends this checkout to the hosts of a file, sets bare ones up, and stays until the end.
"""

import argparse
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_fleet.ssh.options import add_options
from titan_fleet.submit.job import Job
from titan_fleet.submit.sites import SITES
from torchtitan.models.families import load_run_or_exit
from torchtitan.refusal import Refusal

_KUBERNETES = ("k8s", "jobset")
_ONLY_FOR = {"project": ("runai",), "hosts": ("ssh",), "program": ("ssh",)} | dict.fromkeys(
    ("namespace", "queue", "pull_secret", "resource", "node_label"), _KUBERNETES
)


HELP = "submit a run to Slurm, Run:ai, Kubernetes or SkyPilot, or start it on hosts by ssh"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "site",
        choices=("slurm", "runai", "k8s", "jobset", "sky", "ssh"),
        help="the site whose client submits the job; ssh: the hosts of --hosts",
    )
    parser.add_argument(
        "--config", default="train_configs/debug_model.toml", help="TOML file to train with (default: %(default)s)"
    )
    parser.add_argument("--nodes", type=int, default=1, help="number of machines (default: %(default)s)")
    parser.add_argument(
        "--gpus", type=int, default=8, help="GPUs on each machine; 0 trains on the CPU (default: %(default)s)"
    )
    parser.add_argument("--gpu_kind", help="kind of GPU, such as H100; sky needs it, other sites refuse it")
    parser.add_argument(
        "--image",
        help="container image, built from the Dockerfile; runai, k8s and jobset need it, ssh sets hosts up by it",
    )
    parser.add_argument(
        "--mount",
        action="append",
        default=[],
        metavar="WHAT:WHERE",
        help="a volume claim, bucket URL or folder, and the path where the job sees it; may be repeated",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment variable of the job; may be repeated",
    )
    parser.add_argument("--secret", help="Kubernetes secret whose key HF_TOKEN holds the Hugging Face token")
    parser.add_argument(
        "--download",
        nargs="?",
        const="1",
        metavar="OWNER/NAME",
        help="fetch the tokenizer at the start if its folder has none (default: of the repository with its name)",
    )
    parser.add_argument("--project", help="project of Run:ai (default: the client's own)")
    parser.add_argument("--namespace", help="Kubernetes namespace (default: the client's own)")
    parser.add_argument("--queue", help="local queue of Kueue that admits the job")
    several: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument("--pull_secret", **several, help="secret for the image's registry; may be repeated")
    parser.add_argument(
        "--resource", **several, metavar="NAME=COUNT", help="what a node needs besides GPUs, such as rdma/ib=8"
    )
    parser.add_argument("--node_label", **several, metavar="KEY=VALUE", help="a label that the nodes must have")
    parser.add_argument("--name", help="name of the job (default: made from the name of the TOML file)")
    parser.add_argument(
        "--api", type=int, choices=(1, 2), default=2, help="1 uses the older interface: runai submit-dist, PyTorchJob"
    )
    parser.add_argument(
        "--print", "--dry-run", dest="prints", action="store_true", help="print the submission, and submit nothing"
    )
    add_options(parser)
    parser.epilog = "Everything after -- goes to train.py."


def plan_job(args: argparse.Namespace, options: Sequence[str], has_token: bool) -> Job:
    for name, least in (("nodes", 1), ("gpus", 0)):
        if getattr(args, name) < least:
            raise Refusal(f"--{name} {getattr(args, name)} is not a number of {name}; use {least} or more")
    if args.secret and args.site in ("slurm", "sky"):
        raise Refusal(
            f"--secret {args.secret} names a Kubernetes secret, which {args.site} cannot read; "
            f"set HF_TOKEN where you submit"
        )
    if args.gpu_kind and args.site != "sky":
        raise Refusal(
            f"--gpu_kind {args.gpu_kind} works only for sky; drop it, and choose the GPU in {args.site}'s own settings"
        )
    for option, sites in _ONLY_FOR.items():
        if (given := getattr(args, option)) and args.site not in sites:
            shown = given if isinstance(given, str) else " ".join(given)
            raise Refusal(f"--{option} {shown} works only for {' and '.join(sites)}; drop it")
    for option in ("resource", "node_label"):
        for given in getattr(args, option):
            if not re.fullmatch("[^=]+=[^=]+", given):
                raise Refusal(f"--{option} {given} is not an assignment; use NAME=VALUE")
    for given in args.env:
        if not re.match("[A-Za-z_][A-Za-z0-9_]*=", given):
            raise Refusal(f"--env {given} is not an assignment; use NAME=VALUE")
        if given.startswith(("HF_TOKEN=", "HUGGING_FACE_HUB_TOKEN=")):
            raise Refusal(
                f"--env {given.partition('=')[0]}=... would show the token to everyone who sees the job; use --secret, "
                f"or under Slurm and SkyPilot set HF_TOKEN where you submit"
            )
    for given in args.mount:
        if not re.fullmatch(".+:/.*", given):
            raise Refusal(f"--mount {given} names no path for the job; use WHAT:/WHERE")
    name = args.name or re.sub("[^a-z0-9]+", "-", Path(args.config).stem.lower()).strip("-")
    if not re.fullmatch("[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise Refusal(
            f"--name {name} is not a valid name; use a letter, then up to 39 of a-z, 0-9 and -, the last of them no -"
        )
    env = dict(given.split("=", 1) for given in args.env)
    if args.download:
        env["DOWNLOAD"] = args.download
    if env.get("PREFLIGHT", "0") != "0":
        env.setdefault("PREFLIGHT_SECRET", secrets.token_hex(16))
    return Job(
        name=name,
        config=args.config,
        nodes=args.nodes,
        gpus=args.gpus,
        gpu_kind=args.gpu_kind,
        image=args.image,
        mounts=[(what, where) for what, _, where in (given.rpartition(":") for given in args.mount)],
        env=env,
        secret=args.secret,
        has_token=has_token,
        options=options,
        project=args.project,
        namespace=args.namespace,
        queue=args.queue,
        pull_secrets=args.pull_secret,
        resources=dict(given.split("=") for given in args.resource),
        node_labels=dict(given.split("=") for given in args.node_label),
    )


def _on_hosts(args: argparse.Namespace, options: Sequence[str]) -> int:
    given = {"nodes": args.nodes != 1, "gpus": args.gpus != 8, "mount": args.mount}
    given |= {"secret": args.secret, "download": args.download, "api": args.api != 2}
    if wrong := next((option for option, is_given in given.items() if is_given), None):
        raise Refusal(f"--{wrong} does not work for ssh; drop it, and give each host gpus= in the file of --hosts")
    from titan_fleet.ssh import terminal

    return terminal.run(args, options)


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    if args.site == "ssh":
        plan_job(args, options, has_token=False)
        return _on_hosts(args, options)
    if (args.site, args.api) not in SITES:
        raise Refusal(f"--api {args.api} is given, but {args.site} has only one interface; drop --api")
    job = plan_job(args, options, has_token="HF_TOKEN" in os.environ)
    processes = job.env.get("NGPU", str(max(1, job.gpus)))
    world_size = job.nodes * int(processes) if processes.isdigit() else None
    load_run_or_exit(["--job.config_file", job.config, *options], world_size, rank=0)
    submission = SITES[args.site, args.api](job)
    if args.prints:
        print(submission)
        return 0
    client = submission.command[0]
    if not shutil.which(client):
        raise Refusal(
            f"{client} is not on PATH; install it here, or take the output of --print to a machine that has it"
        )
    if submission.file:
        submission.file.parent.mkdir(parents=True, exist_ok=True)
        submission.file.write_text(submission.text, encoding="utf-8")
    print(shlex.join(submission.command), file=sys.stderr)
    text = None if submission.file else submission.text.encode()
    return subprocess.run(
        submission.command, input=text or None, env={**os.environ, **submission.variables}, check=False
    ).returncode
