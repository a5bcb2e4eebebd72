"""Tokenizers of models that others made: one that cannot be read, or that fails at a text, counts nothing, and nothing else comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.catalog.models import token_count

PLAIN = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}
SPECIAL = [{"SpecialToken": {"id": "x", "type_id": 0}}]
BROKEN = {
    "no JSON": "{",
    "deep": "[" * 200_000,
    "of no type": '{"model": 5}',
    "a table that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "a table with nothing in it": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}},
    "a pattern without an end": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}},
    "a pattern that is none": {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": "x"}},
    "a word that it does not have": {"post_processor": {"type": "TemplateProcessing", "single": SPECIAL, "pair": [], "special_tokens": {}}},
    "no word for the unknown": {"model": {"type": "WordPiece", "unk_token": "u", "continuing_subword_prefix": "#", "max_input_chars_per_word": 5, "vocab": {"a": 0}}},
}  # fmt: skip


def _written(folder: Path, said: dict | str) -> Path:
    folder.mkdir(exist_ok=True)
    text = said if isinstance(said, str) else json.dumps({**PLAIN, **said})
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("what", BROKEN)
def test_a_tokenizer_that_fails_counts_nothing(tmp_path, what):
    texts = ["a b " + "a" * 40 + "c"]
    assert token_count.counts(_written(tmp_path / "broken", BROKEN[what]), texts) is None
    assert token_count.counts(_written(tmp_path / "plain", {}), texts) == [42], "the next one is read as ever"


def test_tables_beside_an_older_tokenizer_may_hold_anything(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    for said in (
        "[]",
        '{"added_tokens_decoder": 5}',
        '{"added_tokens_decoder": {"1": 5}}',
        '{"added_tokens_decoder": {"1": {"content": 5}}}',
    ):
        (tmp_path / "tokenizer_config.json").write_text(said)
        assert token_count.counts(tmp_path, ["aa"]) in (None, [2])
