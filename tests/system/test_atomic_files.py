"""Small files are whole, whoever else writes them at the same moment."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from backend.system.atomic_files import write_text


def test_threads_that_write_the_same_file_do_not_take_each_others_part(tmp_path):
    target = tmp_path / "training.json"
    texts = [json.dumps({"number": n, "filler": "x" * n * 100}) for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: write_text(target, texts[n % 8]), range(160)))
    assert target.read_text() in texts
    assert list(tmp_path.iterdir()) == [target]
