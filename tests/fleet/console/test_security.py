"""What a hostile page, a stranger and a person of a lower role get: nothing. Against real consoles."""

import itertools
import re
import socket
import sqlite3
import ssl
from collections.abc import Iterator

import httpx
import pytest

from tests.fleet.console.served import TOML, Served, make_certificate, served, token, verb, wait_for, write_run
from torchtitan.refusal import Refusal
from torchtitan.tools import verbs

pytest.importorskip("cryptography", reason="cryptography makes the certificate of these tests")
PAGE = {"Accept": "text/html"}


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("loopback")
    write_run(folder / "runs/one", steps=3)
    with served(folder / "home", folder / "runs") as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, dict[str, str]]]:
    """A console that others reach, and a token of each role."""
    folder = tmp_path_factory.mktemp("guarded")
    certificate, key = make_certificate(folder)
    tokens = {role: token(folder / "home", f"the-{role}", role) for role in ("viewer", "operator", "admin")}
    write_run(folder / "runs/one", steps=3)
    options = ["--host", "0.0.0.0", "--certificate", str(certificate), "--key", str(key), "--name", "127.0.0.1"]
    with served(folder / "home", folder / "runs", *options) as console:
        console.client.base_url = f"https://127.0.0.1:{console.port}"
        yield console, tokens


def client_of(page: str) -> str:
    """The id by which the page opens its socket."""
    found = re.search(r"['\"]client_id['\"]: ?['\"]([0-9a-f-]{36})", page)
    assert found
    return found[1]


def start(*words: str) -> None:
    """The verb, in this process: only for what it refuses."""
    module, parser = verbs.load("console")
    module.run(parser.parse_args(["--no-browser", *words]), [])


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8400", "evil.example@127.0.0.1", "", "0.0.0.0"]
)
def test_a_host_that_is_not_the_consoles_own_gets_nothing(console, host):
    for path in ("/", "/api/runs", "/openapi.json", "/login"):
        answer = console.client.get(path, headers={"Host": host, **PAGE})
        assert answer.status_code in (400, 421) and "debug model" not in answer.text


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1"])
def test_the_requests_of_another_page_get_nothing(console, origin):
    start = {"config": TOML, "name": "forged"}
    assert console.client.post("/api/runs", json=start, headers={"Origin": origin}).status_code == 403
    assert console.client.get("/api/runs", headers={"Origin": origin}).status_code == 403
    assert console.shake_hands(Origin=origin).startswith(b"HTTP/1.1 403")


def test_a_forged_form_an_embedding_and_a_fetch_from_another_site_get_nothing(console):
    site = {"Sec-Fetch-Site": "cross-site"}
    navigates = site | {"Sec-Fetch-Mode": "navigate"}
    assert console.client.post("/api/runs/a/delete", headers=navigates).status_code == 403
    assert console.client.get("/api/runs", headers=site | {"Sec-Fetch-Mode": "no-cors"}).status_code == 403
    assert console.client.get("/", headers=navigates | {"Sec-Fetch-Dest": "iframe"}).status_code == 403
    assert console.client.get("/", headers=navigates | {"Sec-Fetch-Dest": "document"}).status_code == 200
    form = {"Content-Type": "text/plain", "Sec-Fetch-Site": "same-site"}
    assert console.client.post("/api/check", content="{}", headers=form).status_code == 403


def test_a_socket_needs_the_consoles_origin_and_host_and_a_page_of_its_person(console):
    assert console.shake_hands(Origin="").startswith(b"HTTP/1.1 403")
    assert console.shake_hands(Host="evil.example", Origin="http://evil.example").startswith(b"HTTP/1.1 403")
    assert console.shake_hands().startswith(b"HTTP/1.1 403")
    assert console.client.get("/_nicegui_ws/socket.io/?EIO=4&transport=polling").status_code == 403
    page = console.client.get("/", headers=PAGE).text
    client = client_of(page)
    assert console.shake_hands(f"&client_id={client}").startswith(b"HTTP/1.1 101")


def test_a_socket_of_a_page_that_was_not_sent_here_learns_only_that(console):
    """So that a page which an earlier console sent loads again."""
    from websockets.sync.client import connect

    address = f"ws://127.0.0.1:{console.port}/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    query = "&client_id=00000000-0000-0000-0000-000000000000&implicit_handshake=true&next_message_id=0&tab_id=1"
    with connect(address + query, origin=console.address) as line:
        assert line.recv(5).startswith("0{")
        line.send("40")
        assert line.recv(5) == '44{"message":"Implicit handshake failed"}'


def test_an_event_that_names_another_page_ends_the_socket(console):
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    own, other = (client_of(console.client.get("/", headers=PAGE).text) for _ in range(2))
    address = f"ws://127.0.0.1:{console.port}/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    for named, is_let in ((own, True), (other, False)):
        query = f"&client_id={own}&implicit_handshake=false&next_message_id=0"
        with connect(address + query, origin=console.address) as line:
            assert line.recv(5).startswith("0{")
            line.send("40")
            assert line.recv(5).startswith("40{")
            event = f'{{"client_id": "{named}", "id": 1, "listener_id": "1", "args": []}}'
            line.send(f'42["event",{event}]')
            line.send("3")
            try:
                line.recv(1 if is_let else 20)
            except TimeoutError:
                assert is_let
            except ConnectionClosed:
                assert not is_let
            else:
                assert is_let


def test_a_page_has_a_strict_policy_with_a_new_nonce_each_time(console):
    answers = [console.client.get("/", headers=PAGE | {"X-Forwarded-Prefix": '"><script>'}) for _ in range(2)]
    policies = [answer.headers["content-security-policy"] for answer in answers]
    assert (
        policies[0] != policies[1] and "default-src 'none'" in policies[0] and "frame-ancestors 'none'" in policies[0]
    )
    assert "'unsafe-inline'" not in policies[0].partition("script-src")[2].partition(";")[0]
    nonce = policies[0].partition("'nonce-")[2].partition("'")[0]
    assert answers[0].text.count("<script") == answers[0].text.count(f'<script nonce="{nonce}"') > 3
    assert answers[0].headers["x-content-type-options"] == "nosniff"


def test_a_body_that_is_too_large_is_refused_announced_or_not(console):
    big = b"x" * (2**20 + 1)
    assert console.client.post("/api/check", content=big).status_code == 413
    assert console.client.post("/api/check", content=iter([big])).status_code in (400, 413)
    assert console.client.post("/api/check", json={"config": "x" * (2**18 + 1)}).status_code == 422


def test_who_asks_too_often_waits(console):
    asked = (console.client.get("/login", headers=PAGE).status_code for _ in range(400))
    codes = list(itertools.takewhile(lambda code: code != 429, asked))
    assert 40 <= len(codes) < 400 and {*codes} == {200}
    wait_for(lambda: console.client.get("/login", headers=PAGE).status_code == 200)
    wait_for(lambda: console.client.get("/api/runs").status_code == 200)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--certificate and --key"),
        (["--host", "0.0.0.0", "--certificate", "README.md"], "belong together"),
        (["--certificate", "nowhere.pem", "--key", "README.md"], "nowhere.pem is no file"),
        (["--host", "0.0.0.0", "--certificate", "README.md", "--key", "README.md"], "no admin has a token"),
        (["--login"], "no admin has a token"),
    ],
)
def test_an_address_that_others_reach_needs_tls_and_a_token(tmp_path, options, words):
    with pytest.raises(Refusal, match=re.escape(words)):
        start("--home", str(tmp_path), *options)


def test_a_port_that_is_taken_is_refused(tmp_path, console):
    with pytest.raises(Refusal, match="choose another --port"):
        start("--home", str(tmp_path), "--port", str(console.port))


def test_without_a_token_there_is_only_the_login(guarded):
    console, _ = guarded
    for path in ("/api/runs", "/api/session", "/openapi.json", "/run/one", "/_nicegui/x"):
        assert console.client.get(path).status_code == 401
    sent = console.client.get("/", headers=PAGE)
    assert (sent.status_code, sent.headers["location"]) == (303, "/login")
    assert console.client.get("/login").status_code == 200
    assert console.client.get("/api/runs", headers=bearer("a.b")).status_code == 401
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{console.port}/login")


def test_each_role_may_what_it_says_and_no_more(guarded):
    console, tokens = guarded
    run = console.client.get("/api/runs", headers=bearer(tokens["viewer"])).json()[0]["id"]
    asked = {
        "check": ("POST", "/api/check", {"config": TOML}),
        "start": ("POST", "/api/runs", {"config": "[job", "name": "a"}),
        "stop": ("POST", f"/api/runs/{run}/stop", None),
        "generate": ("POST", f"/api/runs/{run}/generate", {"checkpoint": "step-99", "prompt": "a"}),
        "submit": ("POST", "/api/submissions", {"site": "slurm", "config": "[job", "name": "a"}),
        "resume": ("POST", f"/api/runs/{run}/resume", None),
        "tag": ("POST", f"/api/runs/{run}/tags", {"add": ["x"]}),
        "save": ("POST", "/api/designs", {"name": "x", "config": ""}),
        "remove": ("POST", "/api/designs/x/delete", {"version": 5}),
        "designs": ("GET", "/api/designs", None),
        "audit": ("GET", "/api/audit", None),
    }
    codes = {}
    for role, shown in tokens.items():
        for what, (method, path, body) in asked.items():
            codes[role, what] = console.client.request(method, path, json=body, headers=bearer(shown)).status_code
    # 409 for stop: the run was not started by a node program
    assert [codes["viewer", what] for what in asked] == [403, 403, 409, 403, 403, 403, 403, 403, 403, 200, 403]
    assert [codes["operator", what] for what in asked] == [200, 409, 409, 404, 409, 409, 200, 200, 409, 200, 403]
    assert [codes["admin", what] for what in asked] == [200, 409, 409, 404, 409, 409, 200, 409, 409, 200, 200]
    rows = console.client.get("/api/audit", headers=bearer(tokens["admin"])).json()
    refused = [row for row in rows if row["who"] == "the-viewer" and row["what"] == "start"]
    assert refused[0]["outcome"].startswith("refused: the-viewer is viewer, and this needs operator")


def test_a_login_gives_a_cookie_that_scripts_and_other_sites_cannot_use_and_needs_a_csrf_token(guarded):
    console, tokens = guarded
    wrong = console.client.post("/login", data={"token": "wrong"})
    assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
    right = console.client.post("/login", data={"token": tokens["operator"]})
    cookie = right.headers["set-cookie"]
    assert right.status_code == 303 and cookie.startswith("__Host-console=")
    assert all(word in cookie for word in ("HttpOnly", "Secure", "SameSite=strict", "Path=/"))
    shown = {"Cookie": cookie.partition(";")[0]}
    console.client.cookies.clear()
    session = console.client.get("/api/session", headers=shown).json()
    assert (session["name"], session["role"]) == ("the-operator", "operator")
    check = {"config": TOML}
    assert console.client.post("/api/check", json=check, headers=shown).status_code == 403
    assert console.client.post("/api/check", json=check, headers=shown | {"X-CSRF-Token": "x"}).status_code == 403
    own = shown | {"X-CSRF-Token": session["csrf"]}
    assert console.client.post("/api/check", json=check, headers=own).status_code == 200
    page = console.client.get("/", headers=shown | PAGE)
    client = client_of(page.text)
    assert client and handshake(console, client, shown["Cookie"]).startswith(b"HTTP/1.1 101")
    assert handshake(console, client, "").startswith(b"HTTP/1.1 403")
    other = console.client.post("/login", data={"token": tokens["viewer"]}).headers["set-cookie"].partition(";")[0]
    assert handshake(console, client, other).startswith(b"HTTP/1.1 403")  # another person's page
    console.client.cookies.clear()
    console.client.post("/logout", headers=shown)
    wait_for(lambda: console.client.get("/api/session", headers=shown).status_code == 401)


def handshake(console: Served, client: str, cookie: str) -> bytes:
    host = f"127.0.0.1:{console.port}"
    lines = [f"GET /_nicegui_ws/socket.io/?EIO=4&transport=websocket&client_id={client} HTTP/1.1", f"Host: {host}"]
    lines += [f"Origin: https://{host}", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    lines += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", *([f"Cookie: {cookie}"] if cookie else []), "", ""]
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", console.port), timeout=10) as plain, context.wrap_socket(plain) as tls:
        tls.sendall("\r\n".join(lines).encode())
        return tls.recv(4096).split(b"\r\n")[0]


def test_a_database_that_fails_is_named_and_lets_nobody_in(guarded):
    console, tokens = guarded
    with sqlite3.connect(console.home / "console/console.db") as plain:
        for name in ("tokens", "designs"):
            plain.execute(f"alter table {name} rename to away_{name}")
        try:
            unknown = console.client.get("/api/runs", headers=bearer("0000000000000000.x"))
            assert unknown.status_code == 503 and "the console's database fails" in unknown.json()["detail"]
        finally:
            for name in ("tokens", "designs"):
                plain.execute(f"alter table away_{name} rename to {name}")
    assert console.client.get("/api/designs", headers=bearer(tokens["viewer"])).status_code == 200


def test_a_revoked_token_is_refused_within_seconds_and_no_secret_is_stored(guarded):
    console, _ = guarded
    shown = token(console.home, "short-lived", "admin")
    assert console.client.get("/api/runs", headers=bearer(shown)).status_code == 200
    database = console.home / "console/console.db"
    assert database.stat().st_mode & 0o077 == 0
    stored = b"".join(file.read_bytes() for file in database.parent.glob("console.db*"))
    assert shown.partition(".")[2].encode() not in stored
    with sqlite3.connect(database) as plain:
        assert ("short-lived",) in plain.execute("select name from tokens").fetchall()
    assert "short-lived" in verb("console", "token", "list", "--home", str(console.home))
    verb("console", "token", "revoke", "short-lived", "--home", str(console.home))
    wait_for(lambda: console.client.get("/api/runs", headers=bearer(shown)).status_code == 401)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["add", "two words"], "has characters that a log cannot show"),
        (["add", "ada"], "has a token already"),
        (["revoke", "nobody"], "has no token"),
        (["add"], "names nobody"),
    ],
)
def test_a_token_that_cannot_be_made_or_revoked_is_refused(tmp_path, words, said):
    module, parser = verbs.load("console token")
    module.run(parser.parse_args(["add", "ada", "--home", str(tmp_path)]), [])
    with pytest.raises(Refusal, match=said):
        module.run(parser.parse_args([*words, "--home", str(tmp_path)]), [])


def test_guessing_tokens_is_slowed_down(guarded):
    console, tokens = guarded
    codes = [console.client.post("/login", data={"token": f"a.{i}"}).status_code for i in range(14)]
    assert codes[-1] == 429
    assert console.client.get("/api/runs", headers=bearer(tokens["viewer"])).status_code == 200  # who has one is let in
