"""Puts the console together and serves it: database, nodes, runs, API, page, and the gate around them."""

import argparse
import shlex
import socket
import threading
import webbrowser
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from nicegui import core, ui
from sqlalchemy.engine import Engine

from titan_fleet.console.actions import Actions
from titan_fleet.console.api import build_api, build_app
from titan_fleet.console.database import Audit, Kept
from titan_fleet.console.door.gate import Gate, Rules, loopback
from titan_fleet.console.door.limits import Limits
from titan_fleet.console.door.login import build_login
from titan_fleet.console.door.people import People
from titan_fleet.console.failures import Failures
from titan_fleet.console.library import Library
from titan_fleet.console.nodes import Nodes
from titan_fleet.console.pages import audit as audit_page
from titan_fleet.console.pages import compare, new_run, one_run, runs
from titan_fleet.console.pages import nodes as nodes_page
from titan_fleet.console.pages.frame import ICON, Parts, owner_of
from torchtitan.launch.addresses import own_addresses
from torchtitan.refusal import Refusal

_MOST_CONNECTIONS = 300
_MOST_MESSAGE_BYTES = 2**20


def serve(args: argparse.Namespace, engine: Engine, needs_login: bool) -> None:
    home = Path(args.home).expanduser().resolve()
    people, audit, kept = People(engine), Audit(engine), Kept(engine)
    listener = _listen(args.host, args.port)
    file = Path(args.nodes) if args.nodes else None
    shown = [Path(path) for path in (args.runs or ["outputs"]) + args.watch]
    nodes = Nodes(home, file, shlex.split(args.ssh), args.node_home, shown, Path(args.links), args.git)
    library = Library(home, shown, nodes, kept.tags)
    actions = Actions(home, library, nodes, people, audit, kept)
    rules = Rules(_names(args.host, args.name), is_tls=bool(args.certificate), needs_login=needs_login)
    limits = Limits()
    app = build_app()
    app.include_router(build_api(library, nodes, actions, audit, kept))
    app.include_router(build_login(rules, people, audit, limits))
    _add_pages(app, Parts(library, nodes, actions, kept, audit))
    seconds: dict[str, Any] = {"timeout_keep_alive": 20, "timeout_graceful_shutdown": 2}
    sockets: dict[str, Any] = {"ws_max_size": _MOST_MESSAGE_BYTES, "ws_per_message_deflate": False}
    tls = {"ssl_certfile": args.certificate, "ssl_keyfile": args.key}
    gate = Gate(app, rules, people, audit, owner_of, limits)
    quiet: dict[str, Any] = {"log_level": "warning", "proxy_headers": False, "server_header": False}
    config = uvicorn.Config(gate, limit_concurrency=_MOST_CONNECTIONS, **seconds, **sockets, **tls, **quiet)
    address = f"{rules.scheme}://{f'[{args.host}]' if ':' in args.host else args.host}:{listener.getsockname()[1]}"
    nodes.start()
    library.start()
    Failures(library, audit).start()
    try:
        print(f"console: {address}   (Ctrl-C ends it; runs go on)", flush=True)
        if not args.no_browser:
            threading.Timer(1, webbrowser.open, [address]).start()
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        nodes.close()


def _add_pages(app: FastAPI, parts: Parts) -> None:
    for page in (runs, one_run, nodes_page, compare, new_run, audit_page):
        page.add(parts)
    # Tailwind's script would write styles while the page runs; the gate reads pages, so they are not packed.
    looks: dict[str, Any] = {"title": "console", "favicon": ICON, "dark": None, "tailwind": False}
    memory: dict[str, Any] = {"reconnect_timeout": 10, "message_history_length": 200}
    ui.run_with(app, gzip_middleware_factory=None, show_welcome_message=False, **looks, **memory)
    core.app.config.socket_io_js_transports = ["websocket"]


def _listen(host: str, port: int) -> socket.socket:
    """The port is taken before anything is started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise Refusal(f"--host {host} --port {port} cannot be listened at: {error}; choose another --port") from None
    return listener


def _names(host: str, more: list[str]) -> frozenset[str]:
    """What a browser may call this console. On loopback, a name of somebody else's DNS is none of these."""
    names = {name.lower() for name in more}
    if loopback(host):
        return frozenset(names | {"localhost", "127.0.0.1", "::1"})
    if host in ("0.0.0.0", "::"):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower(), "localhost", *own_addresses()}
    return frozenset(names | {host.lower()})
