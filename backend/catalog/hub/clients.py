"""The two places that models come from, through their own clients: what a model has, and how to bring files of it.

The clients are imported when one is asked for, never before.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from backend.system.atomic_files import rename_over

MARKS = ".loft_incomplete"  # a folder in a model's folder, for what is still on its way
SECONDS = 15.0  # that a server may be silent
OnDone = Callable[[int], None] | None  # bytes so far


def _list_modelscope(model_id: str) -> dict[str, int]:
    from modelscope.hub.api import HubApi

    files = HubApi().get_model_files(model_id, recursive=True)
    return {file["Path"]: int(file["Size"]) for file in files if file.get("Type") != "tree"}


def _fetch_modelscope(model_id: str, root: Path, names: list[str], tell: OnDone) -> None:
    from modelscope import snapshot_download
    from modelscope.hub.callback import ProgressCallback

    done, lock = 0, threading.Lock()  # several files arrive at once

    class Progress(ProgressCallback):
        def update(self, size: int) -> None:
            nonlocal done
            with lock:
                done += size
                if tell is not None:
                    tell(done)

    callbacks: list[type[ProgressCallback]] | None = [Progress] if tell else None
    snapshot_download(model_id, local_dir=str(root), allow_file_pattern=names, progress_callbacks=callbacks)


def _list_huggingface(model_id: str) -> dict[str, int]:
    from huggingface_hub import HfApi

    found = HfApi().model_info(model_id, files_metadata=True).siblings or ()
    return {file.rfilename: int(file.size or 0) for file in found}


def _fetch_huggingface(model_id: str, root: Path, names: list[str], tell: OnDone) -> None:
    """File by file with the client's own transfer, because its `hf_hub_download` throws away what an interrupted try
    has brought."""
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers
    from tqdm.auto import tqdm

    done = 0

    class Progress(tqdm):
        def update(self, n=1):
            nonlocal done
            done += int(n or 0)
            if tell is not None:
                tell(done)
            return super().update(n)

    commit = HfApi().model_info(model_id).sha
    for name in names:
        partial = root / MARKS / hashlib.sha256(f"{name}@{commit}".encode()).hexdigest()[:24]
        partial.touch()
        with partial.open("r+b") as file:
            got = file.seek(0, os.SEEK_END)
            done += got
            url = hf_hub_url(model_id, name, revision=commit)
            http_get(url, file, resume_size=got, headers=build_hf_headers(), tqdm_class=Progress if tell else None)
            file.flush()
            os.fsync(file.fileno())
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        rename_over(partial, root / name)


def _read_modelscope(model_id: str, name: str, start: int, stop: int) -> bytes:
    import requests
    from modelscope.hub.api import HubApi, ModelScopeConfig
    from modelscope.hub.file_download import get_file_download_url

    url = get_file_download_url(model_id, name, "master", HubApi().endpoint)
    cookies = ModelScopeConfig.get_cookies()
    with requests.get(url, headers=_range(start, stop), cookies=cookies, stream=True, timeout=SECONDS) as answer:
        answer.raise_for_status()
        return _first(answer.iter_content(2**16), stop - start, partial=answer.status_code == 206 or start == 0)


def _read_huggingface(model_id: str, name: str, start: int, stop: int) -> bytes:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session

    headers = {**build_hf_headers(), **_range(start, stop)}
    url = hf_hub_url(model_id, name)
    with get_session().stream("GET", url, headers=headers, timeout=SECONDS, follow_redirects=True) as answer:
        answer.raise_for_status()
        return _first(answer.iter_bytes(2**16), stop - start, partial=answer.status_code == 206 or start == 0)


def _range(start: int, stop: int) -> dict[str, str]:
    return {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}


def _first(pieces: Iterable[bytes], count: int, *, partial: bool) -> bytes:
    """The first `count` bytes; the rest of an answer that is longer than was asked is not waited for."""
    if not partial:
        raise OSError("the server does not answer requests for a part of a file")
    found = bytearray()
    for piece in pieces:
        found += piece
        if len(found) >= count:
            break
    return bytes(found[:count])


# source -> how to read bytes start..stop of a model's file without the rest
READERS = {"modelscope": _read_modelscope, "huggingface": _read_huggingface}
# source -> (what a model has: {name: bytes}, how to bring some of it)
CLIENTS = {
    "modelscope": (_list_modelscope, _fetch_modelscope),
    "huggingface": (_list_huggingface, _fetch_huggingface),
}
