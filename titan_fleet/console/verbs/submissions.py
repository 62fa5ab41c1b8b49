"""Submits a run to Slurm or Kubernetes by `launch`, in a process of its own; the site's client is on this machine."""

import shutil
import tempfile
from pathlib import Path

from titan_fleet.console.answers import Submission, SubmitRun
from titan_fleet.console.text import inert
from titan_fleet.console.verbs.call import call
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
    if wish.only_print:  # a job of this name may wait in a queue, so its file stays as it is
        with tempfile.TemporaryDirectory(dir=file.parent) as temporary:
            (config := Path(temporary) / file.name).write_text(wish.config, encoding="utf-8")
            return _launch(wish, config, file, folder)
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(wish.config)
    except FileExistsError:
        raise Refusal(f"{file} exists already: {wish.name} was submitted before; choose another name") from None
    return _launch(wish, file, file, folder)


def _launch(wish: SubmitRun, config: Path, shown: Path, folder: Path) -> Submission:
    """Runs `launch`. Its words name the file that a submitted job reads, also where it printed from another."""
    words = [wish.site, f"--config={config}", f"--nodes={wish.nodes}", f"--gpus={wish.gpus}", f"--name={wish.name}"]
    words += [f"--image={wish.image}"] * bool(wish.image) + [f"--mount={mount}" for mount in wish.mounts]
    words += ["--print"] * wish.only_print + ["--", "--job.dump_folder", str(folder)]
    done = call(["launch", *words], _SECONDS, f"try {_CLIENTS[wish.site]} in a terminal")
    out, error = (inert(said).strip().replace(str(config), str(shown)) for said in (done.stdout, done.stderr))
    if done.returncode:
        config.unlink()
        raise Refusal(error[-2000:].removeprefix("error: ") or f"{wish.site} takes no job")
    return Submission(text=out[-(2**16) :], folder=inert(str(folder).encode()))
