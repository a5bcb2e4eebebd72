"""Model files: found here first, brought by the real clients from a server on this machine, resumed, and never when offline."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from backend.catalog.hub import download
from backend.schema.messages import Trouble
from backend.schema.paths import PROJECT

FILES = {
    "transformer/a-00001-of-00002.safetensors": b"a" * 24_000_000,
    "transformer/a-00002-of-00002.safetensors": b"b" * 1_000,
    "vae/model.safetensors": b"v" * 500,
    "tokenizer/tokenizer.json": b"{}",
    "tokenizer/sub/extra.txt": b"extra",
    "../outside.txt": b"no",
}


class Hub(BaseHTTPRequestHandler):
    """Answers the requests that the two clients make for one model, `owner/name`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        url = urlsplit(self.path)
        self.server.seen.append((self.command, self.path, self.headers.get("Range", "")))
        path, query = unquote(url.path), {key: one[0] for key, one in parse_qs(url.query).items()}
        if path == "/control":
            self.server.cut_after, self.server.refuse = int(query["cut_after"]), False
            self._send(b"{}")
        elif path.startswith("/api/models/owner/name"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            self._send(json.dumps({"id": "owner/name", "sha": "0" * 40, "siblings": siblings}).encode())
        elif path.startswith("/owner/name/resolve/"):
            self._send_file(path.split("/", 5)[5])
        elif path.startswith("/api/v1/models/owner/name/repo/files"):
            files = [
                {
                    "Path": name,
                    "Name": name,
                    "Type": "blob",
                    "Size": len(data),
                    "Sha256": hashlib.sha256(data).hexdigest(),
                }
                for name, data in FILES.items()
            ]
            self._send(json.dumps({"Code": 200, "Success": True, "Data": {"Files": files}}).encode())
        elif path == "/api/v1/models/owner/name/repo":
            self._send_file(query["FilePath"])
        elif path.startswith("/api/v1/models/owner/name"):
            self._send(json.dumps({"Code": 200, "Success": True, "Data": {"Name": "name", "RevisionMap": {}}}).encode())
        else:
            self._send(b'{"error": "not found"}', status=404)

    do_HEAD = do_GET

    def _send(self, body: bytes, status: int = 200, headers: dict | None = None, cut: int = 0):
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: cut or None])
        self.server.sent += len(body[: cut or None])
        if cut:
            self.close_connection = True

    def _send_file(self, name: str):
        if self.server.refuse:
            return self._send(b"{}", status=503)
        data = FILES[name]
        etag = hashlib.sha256(data).hexdigest()
        headers = {
            "ETag": f'"{etag}"',
            "X-Repo-Commit": "0" * 40,
            "Accept-Ranges": "bytes",
            "X-Linked-Size": str(len(data)),
        }
        start, status = 0, 200
        if self.headers.get("Range"):
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, end, status = int(first), int(last or len(data) - 1), 206
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data = data[: end + 1]
        cut = self.server.cut_after if self.command == "GET" and len(data) - start > self.server.cut_after > 0 else 0
        self.server.refuse = cut > 0
        self._send(data[start:], status, {"Content-Type": "application/octet-stream", **headers}, cut)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.cut_after, server.sent, server.refuse = [], 0, 0, False
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


SCRIPT = """
import json, sys, urllib.request
from backend.catalog.hub import download
from backend.schema.messages import Trouble

source, address = sys.argv[1:]
out = {}
def attempt(name, *asked, **options):
    try:
        out[name] = [str(path) for path in download.resolve(*asked, source=source, **options)]
    except Trouble as trouble:
        out[name] = trouble.kind
def cut(after):
    urllib.request.urlopen(f"{address}/control?cut_after={after}").read()

told = []
cut(15_000_000)
attempt("cut", "owner/name", "transformer/*.safetensors")
cut(0)
attempt("resumed", "owner/name", "transformer/*.safetensors", on_bytes=lambda done, total: told.append((done, total)))
attempt("again", "owner/name", "transformer/*.safetensors")
attempt("folder", "owner/name", "tokenizer/")
attempt("nothing", "owner/name", "nix/*.safetensors")
attempt("no_model", "owner/other", "vae/*.safetensors")
out["told"] = told[-1:]
print("RESULT" + json.dumps(out))
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", ["modelscope", "huggingface"])
def test_the_clients_bring_what_is_missing_and_go_on_where_they_ended(hub, data, source):
    address = f"http://127.0.0.1:{hub.server_port}"
    env = {
        **os.environ,
        "PYTHONPATH": str(PROJECT),
        "MODELSCOPE_ENDPOINT": address,
        "HF_ENDPOINT": address,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(data.root / "hf"),
        "MODELSCOPE_CACHE": str(data.root / "ms"),
        "MODELSCOPE_DOWNLOAD_MAX_RETRIES": "1",
        "MODELSCOPE_DOWNLOAD_RETRY_MAX_DELAY_SECONDS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, source, address],
        env=env,
        cwd=data.root,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.rpartition("RESULT")[2])
    root = data.models / "owner" / "name"
    shards = [str(root / name) for name in FILES if name.startswith("transformer/")]
    assert out["resumed"] == out["again"] == shards and out["cut"] == "download_failed"
    assert (
        out["folder"] == [str(root / "tokenizer")]
        and (root / "tokenizer" / "sub" / "extra.txt").read_bytes() == b"extra"
    )
    assert out["nothing"] == "missing_model" and out["no_model"] in ("download_failed", "missing_model")
    for name in FILES:
        if name.startswith("transformer/"):
            assert (root / name).read_bytes() == FILES[name]
    assert not (root / "vae").exists() and not (root.parent / "outside.txt").exists()
    assert out["told"] == [[24_001_000, 24_001_000]]
    wanted = sum(len(body) for name, body in FILES.items() if name.startswith(("transformer/", "tokenizer/")))
    assert wanted <= hub.sent < wanted + 6_000_000, (
        "what had arrived was asked for again"
    )  # but for a last chunk of 10 MB


def test_what_is_here_needs_no_network(data, monkeypatch):
    monkeypatch.setitem(download.CLIENTS, "modelscope", None)  # any use of a client would fail
    assert download.resolve("loft/starter", "transformer/*.safetensors")[0].parent.name == "transformer"
    assert download.resolve("loft/starter", "tokenizer/")[0].name == "tokenizer"
    own = data.models / "loft" / "starter" / "transformer" / "mine.safetensors"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"x")
    assert download.resolve("loft/starter", "transformer/*.safetensors") == [own]  # the data folder comes first
    assert download.resolve("loft/starter", "vae/*.safetensors")[0].is_file()  # and the assets for what it lacks


@pytest.mark.parametrize("name", ["DIFFSYNTH_SKIP_DOWNLOAD", "HF_HUB_OFFLINE"])
def test_offline_says_what_is_missing(data, monkeypatch, name):
    monkeypatch.setitem(download.CLIENTS, "modelscope", None)
    monkeypatch.setenv(name, "True")
    with pytest.raises(Trouble, match="downloads are switched off") as caught:
        download.resolve("Qwen/Qwen-Image", "transformer/*.safetensors")
    assert caught.value.kind == "missing_model" and str(data.models / "Qwen" / "Qwen-Image") in caught.value.hint


def test_offline_imports_no_client_and_opens_no_socket(data):
    code = (
        "import socket, sys\n"
        "def no(*_, **__): raise SystemExit('a socket was opened')\n"
        "socket.socket.connect = socket.getaddrinfo = no\n"
        "from backend.catalog.hub import download\n"
        "status = download.main(['Qwen/Qwen-Image', 'vae/*.safetensors'])\n"
        "assert not {'modelscope', 'huggingface_hub', 'requests', 'torch'} & set(sys.modules)\n"
        "sys.exit(status)"
    )
    env = {**os.environ, "DIFFSYNTH_SKIP_DOWNLOAD": "true", "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=data.root, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1 and "Qwen/Qwen-Image" in done.stderr, done.stderr


def test_the_environment_names_folder_and_source(data, tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFSYNTH_MODEL_BASE_PATH", str(tmp_path / "elsewhere"))
    file = tmp_path / "elsewhere" / "a" / "b" / "x.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    assert download.resolve("a/b", "*.safetensors") == [file]
    asked = []
    monkeypatch.setitem(download.CLIENTS, "huggingface", (lambda model_id: asked.append(model_id) or {}, None))
    monkeypatch.setenv("DIFFSYNTH_DOWNLOAD_SOURCE", "huggingface")
    with pytest.raises(Trouble):
        download.resolve("a/c", "*.safetensors")
    assert asked == ["a/c"]
    with pytest.raises(Trouble, match="ftp"):
        download.resolve("a/c", "*.safetensors", source="ftp")


def test_preferences_decide_what_the_environment_leaves_open(data, monkeypatch):
    data.user.mkdir()
    (data.user / "preferences.json").write_text('{"download_source": "huggingface", "offline": false}')
    assert download._source(None) == "huggingface" and not download.is_offline()
    monkeypatch.setenv("DIFFSYNTH_DOWNLOAD_SOURCE", "modelscope")
    assert download._source(None) == "modelscope"
    (data.user / "preferences.json").write_text('{"offline": true}')
    with pytest.raises(Trouble, match="switched off"):
        download.resolve("a/b", "*.safetensors")


def test_incomplete_shards_and_unfinished_downloads_do_not_count(data):
    root = data.models / "a" / "b"
    (root / "t").mkdir(parents=True)
    (root / "t" / "m-00001-of-00002.safetensors").write_bytes(b"x")
    assert download.complete_matches(root, "t/*.safetensors") == []
    (root / "t" / "m-00002-of-00002.safetensors").write_bytes(b"x")
    assert len(download.complete_matches(root, "t/*.safetensors")) == 2
    mark = download._mark(root, "t/")
    mark.parent.mkdir()
    mark.write_text("t/")
    assert download.complete_matches(root, "t/") == []
    assert len(download.complete_matches(root, "t/*.safetensors")) == 2


@pytest.mark.parametrize(
    "model_id, pattern",
    [
        ("../x", "a"),
        ("a/..", "a"),
        ("/etc/passwd", ""),
        ("a", "b"),
        ("a/b/c", "x"),
        ("a/b", "../*"),
        ("a/b", "/etc/*"),
        ("a/b", "x/../../y"),
        ("a/b", "C:/x"),
        ("a/b", "..\\x"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(data, model_id, pattern):
    with pytest.raises(Trouble) as caught:
        download.resolve(model_id, pattern)
    assert caught.value.kind == "bad_value"


def test_a_disk_too_small_is_said_before_anything_is_brought(data, monkeypatch):
    monkeypatch.setitem(
        download.CLIENTS, "modelscope", (lambda _: {"x.safetensors": 2**60}, lambda *_: pytest.fail("it was begun"))
    )
    with pytest.raises(Trouble) as caught:
        download.resolve("a/b", "*.safetensors")
    assert caught.value.kind == "disk_full" and not (data.models / "a" / "b").exists()


@pytest.mark.parametrize(
    "name, pattern, fits",
    [
        ("t/x.safetensors", "t/*.safetensors", True),
        ("t/u/x.safetensors", "t/*.safetensors", False),
        ("tokenizer/a/b.json", "tokenizer/", True),
        ("tokenizer_2/b.json", "tokenizer/", False),
        ("anything", "", True),
    ],
)
def test_patterns(name, pattern, fits):
    assert download.matches(name, pattern) is fits


def test_models_are_found_by_id_and_path(data, tmp_path):
    assert download.find_model("loft/starter").name == "starter"
    assert download.find_model(str(tmp_path)) == tmp_path
    (tmp_path / "more" / "own" / "model").mkdir(parents=True)
    assert download.find_model("own/model", folders=[tmp_path / "more"]) == tmp_path / "more" / "own" / "model"
    data.user.mkdir(
        parents=True, exist_ok=True
    )  # worker, trainer and command line alike look where the preferences say
    (data.user / "preferences.json").write_text(json.dumps({"model_folders": [str(tmp_path / "more")]}))
    assert download.find_model("own/model") == tmp_path / "more" / "own" / "model"
    (data.user / "preferences.json").unlink()
    for name in (
        "my-model",
        "deep/er/model",
        "own/model 2",
    ):  # as the page names a folder that somebody put among the models
        (data.models / name).mkdir(parents=True)
        assert download.find_model(name) == data.models / name
    for name in ("own/model", "", " ", "no such thing", "../no such thing"):
        with pytest.raises(Trouble) as caught:
            download.find_model(name)
        assert caught.value.kind == "missing_model"
