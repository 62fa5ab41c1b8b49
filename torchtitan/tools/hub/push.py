"""Puts a converted model on the Hugging Face hub. The token comes from HF_TOKEN or `hf auth login`."""

from pathlib import Path

from torchtitan.refusal import Refusal


def make_repository(repo: str) -> None:
    """Called before the conversion, which can take an hour: whatever forbids to write there is said first."""
    from huggingface_hub import HfApi, errors, get_token

    if not get_token():
        raise Refusal("--push needs a token that may write: export HF_TOKEN=hf_..., or run `hf auth login`")
    try:
        HfApi().create_repo(repo, private=True)  # exist_ok would pass over a 403
    except errors.HFValidationError as error:
        raise Refusal(f"--push {repo} is not the name of a repository ({error}); give OWNER/NAME") from None
    except (OSError, errors.HTTPError, RuntimeError) as error:
        if answer_of(error)[0] != 409:  # it exists, and the token may write there
            raise Refusal(f"--push {repo}: {_reason(error)}; nothing was converted") from None


def push(repo: str, folder: str) -> str:
    """Put all files of the folder into the repository, as one commit; returns its address."""
    from huggingface_hub import HfApi, errors

    try:
        commit = HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message="Weights and tokenizer")
        return commit.commit_url
    except (OSError, errors.HTTPError, RuntimeError) as error:
        again = f"{Path(folder)} is complete; push it with: hf upload {repo} {folder}"
        raise Refusal(f"--push {repo}: {_reason(error)}; {again}") from None


def _reason(error: Exception) -> str:
    from huggingface_hub import constants

    status, said = answer_of(error)
    if status in (401, 403):
        return f"{constants.ENDPOINT} does not let this token write there ({said}); use a token of the type Write"
    return f"{constants.ENDPOINT} answered {status} ({said})" if status else f"{constants.ENDPOINT}: {said}"


def answer_of(error: Exception) -> tuple[int | None, str]:
    """The status of the hub's answer, and its words on one line."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status, " ".join((getattr(error, "server_message", None) or str(error) or type(error).__name__).split())
