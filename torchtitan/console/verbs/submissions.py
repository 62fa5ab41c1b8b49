"""Submits a run to Slurm or Kubernetes by `launch`, in a process of its own; the site's client is on this machine."""

import shutil
from pathlib import Path

from torchtitan.console.answers import Submission, SubmitRun
from torchtitan.console.text import inert
from torchtitan.console.verbs.call import call
from torchtitan.refusal import Refusal

_SECONDS = 120
_CLIENTS = {"slurm": "sbatch", "k8s": "kubectl", "jobset": "kubectl"}


def sites() -> list[str]:
    """Those whose client this machine has."""
    return [site for site, client in _CLIENTS.items() if shutil.which(client)]


def submit(shown: Path, wish: SubmitRun) -> Submission:
    """Below the shown folder, which the nodes have to share, lie the configuration and then the run."""
    if wish.site not in sites():
        raise Refusal(f"site = {wish.site} needs {_CLIENTS[wish.site]} on the console's machine; install it there")
    top = shown.expanduser().resolve()
    file, folder = top / f".submitted/{wish.name}.toml", top / wish.name
    if folder.exists():
        raise Refusal(f"{folder} exists already; choose another name")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(wish.config, encoding="utf-8")
    words = [wish.site, f"--config={file}", f"--nodes={wish.nodes}", f"--gpus={wish.gpus}", f"--name={wish.name}"]
    words += [f"--image={wish.image}"] * bool(wish.image) + [f"--mount={mount}" for mount in wish.mounts]
    words += ["--print"] * wish.only_print + ["--", "--job.dump_folder", str(folder)]
    done = call(["launch", *words], _SECONDS, f"try {_CLIENTS[wish.site]} in a terminal")
    if done.returncode:
        raise Refusal(inert(done.stderr[-2000:]).strip().removeprefix("error: ") or f"{wish.site} takes no job")
    return Submission(text=inert(done.stdout[-(2**16) :]).strip(), folder=inert(str(folder).encode()))
