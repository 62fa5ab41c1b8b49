"""A small Hugging Face hub on loopback: repositories with one commit, gated and renamed ones, uploads, and faults."""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKENS = {"hf_member": "has access", "hf_stranger": "has none"}


@dataclass
class Repository:
    files: dict[str, bytes]
    gated: bool = False
    claimed: dict[str, int] = field(default_factory=dict)  # sizes that the hub reports instead of the true ones
    cut: set[str] = field(default_factory=set)  # files whose next transfer breaks off half-way
    stalled: set[str] = field(default_factory=set)  # files whose transfer stops half-way without an end
    faults: dict[str, int] = field(default_factory=dict)  # HTTP status to answer instead of the file

    @property
    def commit(self) -> str:
        return hashlib.sha1(b"".join(name.encode() + data for name, data in self.files.items())).hexdigest()

    def sizes(self) -> dict[str, int]:
        return {name: len(data) for name, data in self.files.items()} | self.claimed


class Hub:
    """`repositories` by path, as owner/name or datasets/owner/name. `fetched` lists the files that were requested."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.renamed: dict[str, str] = {}
        self.fetched: list[str] = []
        self.uploaded: dict[str, bytes] = {}  # large files by their checksum
        self.closed = threading.Event()
        hub = self

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                hub.take(self)

            do_PUT = do_POST

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(to.path).path).strip("/")
        token = to.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in TOKENS:
            return send(to, 401, message="Invalid credentials in Authorization header")
        for old, new in self.renamed.items():
            if f"/{old}/" in f"/{path}/":
                return send(to, 307, Location="/" + to.path.lstrip("/").replace(old, new))
        is_api = path.startswith("api/")
        path = path.removeprefix("api/").removeprefix("models/")
        name = next((name for name in self.repositories if f"{path}/".startswith(f"{name}/")), None)
        if name is None:
            return send(to, 404 if token else 401, "RepoNotFound", "Repository not found")
        repository = self.repositories[name]
        verb, _, rest = path.removeprefix(name).strip("/").partition("/")
        revision, _, file = rest.partition("/")
        if revision not in ("", "main", repository.commit):
            return send(to, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if is_api and verb == "tree":
            return send_json(to, [{"type": "file", "path": file, "size": size, "oid": "0" * 40}
                                  for file, size in repository.sizes().items()])  # fmt: skip
        gate = repository.gated and TOKENS.get(token) != "has access"
        if gate and (verb == "auth-check" or not is_api):
            return send(to, 403 if token else 401, "GatedRepo", f"Access to {name} is restricted")
        if is_api:
            siblings = [{"rfilename": file, "size": size} for file, size in repository.sizes().items()]
            return send_json(
                to,
                {
                    "id": name.removeprefix("datasets/"),
                    "sha": repository.commit,
                    "siblings": siblings,
                    "gated": "manual" if repository.gated else False,
                },
            )
        if file in repository.faults:
            return send(to, repository.faults[file], message="Something is broken here")
        self._send_file(to, repository, file)

    def take(self, to: BaseHTTPRequestHandler) -> None:
        """What is uploaded: small files within a commit, large ones (Git LFS) before it."""
        body = to.rfile.read(int(to.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(to.path).path).strip("/")
        if path.startswith("large/"):
            self.uploaded[path.removeprefix("large/")] = body
            return send(to, 200)
        if TOKENS.get(to.headers.get("Authorization", "").removeprefix("Bearer ")) != "has access":
            return send(to, 403, message="You don't have the rights to create a model under this namespace")
        if path == "api/repos/create":
            about = json.loads(body)
            name = f"{about['organization']}/{about['name']}" if about.get("organization") else about["name"]
            if name in self.repositories:
                return send(to, 409, message="You already created this model repo")
            self.repositories[name] = Repository({})
            return send_json(to, {"url": f"{self.url}/{name}", "id": name, "name": name})
        if path.endswith("/info/lfs/objects/batch"):
            wanted = [(each["oid"], each["size"]) for each in json.loads(body)["objects"]]
            put = [{"oid": oid, "size": size, "actions": {"upload": {"href": f"{self.url}/large/{oid}"}}}
                   for oid, size in wanted]  # fmt: skip
            return send_json(to, {"transfer": "basic", "objects": put})
        if "/preupload/" in path:
            modes = [{"path": file["path"], "shouldIgnore": False,
                      "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                     for file in json.loads(body)["files"]]  # fmt: skip
            return send_json(to, {"files": modes})
        name = path.removeprefix("api/models/").partition("/commit/")[0]
        for line in map(json.loads, body.splitlines()):
            about = line["value"]
            if line["key"] == "file":
                self.repositories[name].files[about["path"]] = base64.b64decode(about["content"])
            elif line["key"] == "lfsFile":
                self.repositories[name].files[about["path"]] = self.uploaded[about["oid"]]
        commit = self.repositories[name].commit
        send_json(to, {"success": True, "commitOid": commit, "commitUrl": f"{self.url}/{name}/commit/{commit}"})

    def _send_file(self, to: BaseHTTPRequestHandler, repository: Repository, file: str) -> None:
        data = repository.files[file]
        etag = f'"{hashlib.sha1(data).hexdigest()}"'
        if to.command == "GET":
            self.fetched.append(file)
        body = data
        begin, _, end = to.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if end:
            return send(to, 206, body=data[int(begin) : int(end) + 1])
        if to.command == "GET" and file in repository.stalled:
            send(to, 200, body=data[: len(data) // 2], length=len(data), ETag=etag)
            self.closed.wait()
            return
        if to.command == "GET" and file in repository.cut:
            repository.cut.discard(file)
            body, to.close_connection = data[: len(data) // 2], True
        send(to, 200, body=body, length=len(data), **{"ETag": etag, "X-Repo-Commit": repository.commit})


def send_json(to: BaseHTTPRequestHandler, value: Any) -> None:
    send(to, 200, body=json.dumps(value).encode(), **{"Content-Type": "application/json"})


def send(to: BaseHTTPRequestHandler, status: int, code: str = "", message: str = "", body: bytes = b"",
         length: int | None = None, **headers: str) -> None:  # fmt: skip
    to.send_response(status)
    told = {
        "X-Error-Code": code,
        "X-Error-Message": message,
        "Content-Length": str(len(body) if length is None else length),
    }
    for name, value in (told | headers).items():
        if value:
            to.send_header(name, value)
    to.end_headers()
    if to.command != "HEAD":
        to.wfile.write(body)
