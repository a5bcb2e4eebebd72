"""Sizes of a model that is only a name, by both clients from a server on this machine that counts what it sends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from backend.catalog.hub import download, remote_headers
from backend.catalog.models.identify import identify_model
from backend.families import FAMILIES
from backend.planner.costs.device_speed import what_if
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.plan import plan
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS, PROJECT
from backend.schema.request import GenerationRequest

STARTER = ASSETS / "starter"


class Hub(BaseHTTPRequestHandler):
    """`owner/name` is the starter; parts of files are answered, whole files as long as somebody listens."""

    def do_GET(self):
        url = urlsplit(self.path)
        path, query = unquote(url.path), {key: one[0] for key, one in parse_qs(url.query).items()}
        sizes = {
            found.relative_to(STARTER).as_posix(): found.stat().st_size
            for found in STARTER.rglob("*")
            if found.is_file()
        }
        if path == "/api/models/owner/name":
            files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            self._send(json.dumps({"id": "owner/name", "sha": "0" * 40, "siblings": files}).encode())
        elif path.startswith("/api/v1/models/owner/name/repo/files"):
            files = [
                {"Path": name, "Name": name, "Type": "blob", "Size": size, "Sha256": ""} for name, size in sizes.items()
            ]
            self._send(json.dumps({"Code": 200, "Success": True, "Data": {"Files": files}}).encode())
        elif path == "/api/v1/models/owner/name/repo" or path.startswith("/owner/name/resolve/"):
            self._send_file(query.get("FilePath") or path.split("/", 5)[5])
        elif path == "/api/v1/models/owner/name":
            self._send(json.dumps({"Code": 200, "Success": True, "Data": {"Name": "name", "RevisionMap": {}}}).encode())
        else:
            self._send(b'{"error": "not found"}', status=404)

    def _send_file(self, name: str):
        data = (STARTER / name).read_bytes()
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        span = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self._send(data[int(first) : int(last) + 1], 206, span)

    def _send(self, body: bytes, status: int = 200, headers: dict | None = None):
        self.send_response(status)
        for key, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)
        self.server.sent += len(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.sent, server.daemon_threads = 0, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


SCRIPT = """
import shutil
from backend.catalog.hub import remote_headers as remote
from backend.families import FAMILIES
from backend.schema.messages import Trouble
for source in ("modelscope", "huggingface"):
    spec = remote.look("owner/name", FAMILIES, source=source)
    print(spec.family, sorted((name, part.nbytes) for name, part in spec.parts.items()))
    if source == "modelscope":
        home = remote._home("owner/name", source, remote.places())
        shutil.move(home, home.with_name("aside"))
try:
    remote.look("owner/other", FAMILIES)
except Trouble as trouble:
    print(trouble.kind)
"""


@pytest.mark.slow
def test_headers_alone_are_brought_and_kept(hub, data, monkeypatch):
    address = f"http://127.0.0.1:{hub.server_port}"
    env = {
        **os.environ,
        "PYTHONPATH": str(PROJECT),
        "LOFT_DATA": str(data.root),
        "MODELSCOPE_ENDPOINT": address,
        "HF_ENDPOINT": address,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(data.root / "hf"),
        "MODELSCOPE_CACHE": str(data.root / "ms"),
        "MODELSCOPE_API_MAX_RETRIES": "1",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, cwd=data.root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    own = identify_model(STARTER, FAMILIES)
    parts = f"{own.family} {sorted((name, part.nbytes) for name, part in own.parts.items())}"
    assert done.stdout.splitlines() == [parts, parts, "download_failed"]
    tokenizer = (STARTER / "tokenizer" / "tokenizer.json").stat().st_size
    assert hub.sent / 2 - tokenizer < 150_000 < own.nbytes / 100

    monkeypatch.setattr(download, "_source", None)  # what was read is not asked for again
    spec = remote_headers.look("owner/name", FAMILIES, here=data)
    near, far = sizes_of(own), sizes_of(spec)
    assert not far.estimating and {name: part.blocks for name, part in near.parts.items()} == {
        name: part.blocks for name, part in far.parts.items()
    }
    card, request = what_if("8GiB")[0], GenerationRequest()
    assert plan(spec, card, request) == plan(own, card, request)
    assert isinstance(remote_headers.known("owner/other", FAMILIES, here=data), Trouble)


def test_offline_nothing_is_asked_and_published_sizes_serve(data, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Trouble, match="switched off"):
        remote_headers.look("Qwen/Qwen-Image", FAMILIES, here=data)
    assert remote_headers.known("Qwen/Qwen-Image", FAMILIES, here=data) is None
    assert sizes_of("Qwen/Qwen-Image").published
    for wrong in ("../x/y", "no id", "a/../b"):
        with pytest.raises(Trouble):
            remote_headers.look(wrong, FAMILIES, here=data)
