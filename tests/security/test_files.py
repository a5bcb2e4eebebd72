"""What the studio hands out and takes in: files as what they are, from few folders; uploads within limits, under names that are names."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import time
import wave
from pathlib import Path
from urllib.parse import quote

import pytest
from PIL import Image, PngImagePlugin
from starlette.formparsers import MultiPartException

from backend.schema.preferences import Preferences
from studio.serving.uploads import UNPRINTABLE, clean, limit_bytes, name_of
from tests.security.requests_by_hand import ask, form_of

HTML = "<script>document.title = 'ran'</script>"
WINDOWS = sys.platform == "win32"


def read(site, path: Path | str, **headers: str):
    mine = {"Authorization": f"Bearer {site.token}"}
    return ask(site.port, f"/gradio_api/file={quote(str(path))}", **mine, **headers)


def picture(format: str) -> bytes:
    out = io.BytesIO()
    more = {}
    if format == "PNG":
        more["pnginfo"] = PngImagePlugin.PngInfo()
        more["pnginfo"].add_text("comment", HTML)
    Image.new("RGB", (8, 8), "red").save(out, format, **more)
    return out.getvalue()


def sound() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(b"\0" * 64)
    return out.getvalue()


def tensors() -> bytes:
    head = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(head)) + head + b"\0" * 4


SVG = f'<svg xmlns="http://www.w3.org/2000/svg">{HTML}</svg>'.encode()
CONTENTS = (
    ("poly.html", picture("PNG"), "image/png", "inline"),
    ("a.png", picture("PNG"), "image/png", "inline"),
    ("b.svg", picture("JPEG"), "image/jpeg", "inline"),
    ("c.webp", picture("WEBP"), "image/webp", "inline"),
    ("d.gif", picture("GIF"), "image/gif", "inline"),
    ("e.html", sound(), "audio/wav", "inline"),
    ("f.mp4", b"\0\0\0\x18ftypisom" + b"\0" * 64, "video/mp4", "inline"),
    ("g.safetensors", tensors(), "application/octet-stream", "inline"),
    ("page.html", HTML.encode(), "application/octet-stream", "attachment"),
    ("page.png", HTML.encode(), "application/octet-stream", "attachment"),
    ("drawing.svg", SVG, "application/octet-stream", "attachment"),
    ("drawing.png", SVG, "application/octet-stream", "attachment"),
    ("x.xhtml", HTML.encode(), "application/octet-stream", "attachment"),
    ("x.pdf", b"%PDF-1.4", "application/octet-stream", "attachment"),
    ("x.js", b"alert(1)", "application/octet-stream", "attachment"),
    ("x.css", b"a{}", "application/octet-stream", "attachment"),
    ("x.json", b"{}", "application/octet-stream", "attachment"),
    ("x.xml", SVG, "application/octet-stream", "attachment"),
    ("log.txt", HTML.encode(), "application/octet-stream", "attachment"),
    ("no-ending", HTML.encode(), "application/octet-stream", "attachment"),
    ("torn.png", picture("PNG")[:12], "application/octet-stream", "attachment"),
    ("empty.png", b"", "application/octet-stream", "attachment"),
    ("häßlich \u202e\"';.png", picture("PNG"), "image/png", "inline"),
)


@pytest.mark.parametrize("folder", ["outputs/2026-01-01", "runs/a/samples", "user/inputs", "cache/thumbnails"])
def test_a_file_is_served_as_what_it_is(locked, folder):
    home = locked.places.root / folder
    home.mkdir(parents=True, exist_ok=True)
    for name, content, kind, how in CONTENTS:
        if WINDOWS and '"' in name:
            continue
        (home / name).write_bytes(content)
        reply = read(locked, home / name)
        assert reply.status == 200 and reply.body == content, name
        assert reply.headers["content-type"] == kind, name
        assert reply.headers["content-disposition"].startswith(how), name
        assert "sandbox" in reply.headers["content-security-policy"].split("; "), name
        assert "script" not in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        part = read(locked, home / name, Range="bytes=1-3", Cookie="secret=1")
        assert part.status in (206, 416) and (part.status == 416 or part.body == content[1:4]), name
        assert part.status == 416 or (part.headers["content-type"], "cookie" in part.headers) == (kind, False)
        assert "sandbox" in part.headers["content-security-policy"]
    assert read(locked, home / "poly.html").headers["content-disposition"].endswith("poly.png")


def test_only_files_of_the_served_folders_are_read(locked, tmp_path):
    places = locked.places
    home = places.outputs / "day"
    home.mkdir(parents=True, exist_ok=True)
    secret = tmp_path / "secret.png"
    secret.write_bytes(picture("PNG"))
    beside = places.root / "outputs-beside"
    beside.mkdir(exist_ok=True)
    (beside / "a.png").write_bytes(picture("PNG"))
    (home / "ours.png").write_bytes(picture("PNG"))
    others = [
        secret,
        beside / "a.png",
        places.user / "token",
        places.user / "studio.json",
        places.root / "studio.log",
        home,
        home / "missing.png",
        f"{home}/../../user/token",
        f"{home}/../../../{tmp_path.name}/secret.png",
        "day/ours.png",
        "outputs/day/ours.png",
        f"/{home}/ours.png",
        f"\\\\server\\share{home}/ours.png",
        f"//server/share{home}/ours.png",
        f"file://{home}/ours.png",
        f"http://127.0.0.1:1{home}/ours.png",
        f"{home}/ours.png\0.txt",
        f"{home}/{'a' * 5000}",
        f"{home}/ours.png/",
        "/dev/zero",
        "/proc/self/environ",
        "C:\\Windows\\win.ini",
        "~/.ssh/id_rsa",
        "",
        "/",
        "..",
    ]
    if not WINDOWS:
        (home / "link.png").symlink_to(secret)
        (home / "folder").symlink_to(tmp_path)
        (home / "circle").symlink_to(home / "circle")
        os.mkfifo(home / "fifo.png")
        others += [home / "link.png", home / "folder" / "secret.png", home / "circle", home / "fifo.png"]
    assert read(locked, home / "ours.png").status == 200
    for path in others:
        for route in ("file=", "file/"):
            mine = {"Authorization": f"Bearer {locked.token}"}
            began = time.monotonic()
            reply = ask(locked.port, f"/gradio_api/{route}{quote(str(path))}", **mine)
            if str(path).endswith("ours.png/"):  # the same file, said oddly
                continue
            assert reply.status == 403 and b"may not be read" in reply.body, (route, path)
            assert time.monotonic() - began < 20


# Uploads


def send(site, body: bytes, kind: str, query: str = ""):
    mine = {"Authorization": f"Bearer {site.token}"}
    return ask(site.port, f"/gradio_api/upload{query}", method="POST", body=body, Content_Type=kind, **mine)


def left(site) -> list[Path]:
    """Files among the uploads that are no upload's."""
    return [path for path in (site.places.cache / "uploads").iterdir() if path.is_file()]


def test_uploads_are_kept_under_their_names(locked):
    data = picture("PNG")
    reply = send(locked, *form_of(("häßlich 猫.png", data), ("..\\..\\x/evil?.py", b"1")))
    first, second = (Path(path) for path in json.loads(reply.body))
    assert first.name == "häßlich 猫.png" and first.read_bytes() == data and second.name == "evil_.py"
    uploads = locked.places.cache / "uploads"
    assert all(path.parent.parent == uploads for path in (first, second)) and not left(locked)
    long = json.loads(send(locked, *form_of(("猫" * 200 + ".png", data))).body)[0]
    assert len(Path(long).name.encode()) <= 204 and long.endswith("猫.png")


@pytest.mark.parametrize("name", [" .. ", "..", ".", "/", "a/", "\\", "\x01\x02", "a\0b.png", "\u202e", "...", "   "])
def test_a_name_that_is_none_is_refused(locked, name):
    reply = send(locked, *form_of((name, b"1")))
    assert reply.status == 400 and reply.body and not left(locked)


HOSTILE_NAMES = (
    b"a\0b.png", b"a%00b.png", b"\xff\xfe.png", b"\xed\xa0\x80.png", b"\xc0\xaf..\xc0\xafx.png", b"a\r\nX-Evil: 1\r\n.png", b"a\nb.png",
    b'a"; filename="b.png', b"..%2f..%2fx.png", b"/etc/passwd", b"C:\\windows\\x.ini", b"\\\\server\\share\\x.png", b"file:///etc/passwd",
    b"x" * 100_000 + b".png", "\u202egnp.exe".encode(), b"~root", b"-rf", b"$(id).png", b"a:b:$DATA", b"\x1b[2J.png", b"<img src=x>.png",
)  # fmt: skip


def test_bytes_that_are_no_name_lead_nowhere(locked):
    uploads = locked.places.cache / "uploads"
    before = {path for path in locked.places.root.rglob("*") if uploads not in path.parents}
    for name in HOSTILE_NAMES:
        for way in (b'filename="%s"', b"filename=%s", b"filename*=UTF-8''%s"):
            head = b'--edge\r\nContent-Disposition: form-data; name="files"; ' + way % name
            reply = send(locked, head + b"\r\n\r\n1\r\n--edge--\r\n", "multipart/form-data; boundary=edge")
            assert reply.status in (200, 400), (name[:30], way, reply.body[:100])
            for kept in map(Path, json.loads(reply.body) if reply.status == 200 else ()):
                assert kept.parent.parent == uploads and kept.read_bytes() == b"1", kept
                assert not UNPRINTABLE.search(kept.name) and not set(kept.name) & set('/\\:<>"|?*'), kept
    assert {path for path in locked.places.root.rglob("*") if uploads not in path.parents} - before <= {
        uploads.parent,
        uploads,
    }


def test_what_is_no_upload_is_refused(locked):
    body, kind = form_of(("a.png", b"1"))
    long = b"x" * 20_000
    for sent, said in (
        (body, "application/json"),
        (body, "multipart/form-data"),
        (body, "multipart/form-data; boundary=other"),
        (b"", kind),
        (b"\xff\0" * 50, kind),
        (body[:40], kind),
        (body.replace(b'name="files"', b""), kind),
        (body.replace(b"Content-Disposition", b"X-" + long), kind),
        (form_of(("", b"1"))[0], kind),
        (body, kind + "; charset=nonsense"),
        (b'--edge\r\nContent-Disposition: form-data; name="a"\r\n\r\n' + b"1" * 100_000 + b"\r\n--edge--\r\n", kind),
    ):
        for query in ("", "?upload_id=abc"):
            reply = send(locked, sent, said, query)
            assert reply.status < 500, (sent[:40], said, reply)
            assert reply.status >= 400 or json.loads(reply.body) == [] or b"a.png" in reply.body
    assert not left(locked)


def test_a_file_over_the_limit_is_refused_while_it_arrives(locked):
    file = locked.places.user / "preferences.json"
    file.write_text(json.dumps({"largest_picture_upload_mib": 0.01, "largest_model_upload_gib": 0.001}))
    try:
        assert send(locked, *form_of(("a.png", b"1" * 10_000))).status == 200
        over = send(locked, *form_of(("a.png", b"1" * 5_000), ("b.png", b"1" * 11_000)))
        assert over.status == 413 and b"b.png is larger than 0.01 MiB" in over.body
        assert send(locked, *form_of(("a.safetensors", b"1" * 1_000_000))).status == 200
        assert send(locked, *form_of(("a.safetensors", b"1" * 1_100_000))).status == 413
        assert not left(locked)
    finally:
        file.unlink()


def test_limits_follow_the_kind_of_file():
    default = Preferences()
    for name in ("a.safetensors", "B.GGUF", "c.ckpt"):
        assert limit_bytes(name, default) == 2 * 2**30
    for name in ("a.png", "a.txt", "safetensors", ""):
        assert limit_bytes(name, default) == 64 * 2**20


def test_names():
    assert name_of("C:\\pictures\\a.png") == name_of("a.png") == name_of(" a.png ") == "a.png"
    assert name_of(".hidden") == "hidden" and name_of("a" * 300) == "a" * 200
    assert name_of("two.dots.png") == "two.dots.png"
    assert [name_of(name) for name in ("CON", "nul.png", "com1.a.txt", "icon.png")] == [
        "_CON",
        "_nul.png",
        "_com1.a.txt",
        "icon.png",
    ]
    for none in (None, "", " ", "..", "\0", "a/.."):
        with pytest.raises(MultiPartException, match="give it a name"):
            name_of(none)


def test_old_uploads_are_removed(tmp_path):
    for name, age in (("old/a.png", 2 * 86400), ("new/b.png", 60), ("tmpabc", 2 * 86400)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"1")
        os.utime(path, (time.time() - age,) * 2)
    assert clean(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b.png", "new"]
    assert clean(tmp_path / "missing") == 0
