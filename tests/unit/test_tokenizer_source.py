"""Tokenizers without tokenizer.json: ranks of bytes, SentencePiece models, vocabularies with merges."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from eyas.cluster.checks import check_model
from eyas.common.config import NANO
from eyas.common.errors import ConfigError
from eyas.common.model_folder import TextSource
from eyas.common.tokenizers import byte_ranks
from eyas.common.tokenizers.byte_ranks import of_kimi
from eyas.common.tokenizers.source import read_tokenizer
from eyas.common.tokenizers.vocabulary import decoder_of, pieces
from eyas.engine.checkpoint.folder import named_ends
from gateway.text.tokenizer import Tokenizer as Served
from tests.unit import tokenizer_families
from tests.unit.tokenizer_sources import BYTES, PATTERN, PIECES, TEXTS, WORDS, ranks, sentence_model, tekken


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def by_rank(text: str, known: dict[bytes, int], pattern: str) -> list[int]:
    """What the rule says: the neighbours whose bytes together have the lowest rank become one, left first."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    ids = []
    for word, _ in split.pre_tokenize_str(text):
        parts = [bytes([byte]) for byte in word.encode()]
        if word.encode() in known:
            parts = [word.encode()]
        while True:
            pairs = [(known.get(a + b), at) for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
            found = min(((rank, at) for rank, at in pairs if rank is not None), default=None)
            if found is None:
                break
            at = found[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [known[part] for part in parts]
    return ids


def test_tekken(tmp_path: Path) -> None:
    known = tekken(tmp_path, ["<unk>", "<s>", "</s>", "[NEW]"])
    made = read_tokenizer(tmp_path)
    for text in TEXTS[:-2]:
        assert made.encode(text, add_special_tokens=False).ids == [
            30 + id for id in by_rank(text, known, PATTERN)
        ]
    assert made.encode("[NEW]</s>").ids == [1, 3, 2]
    assert named_ends(TextSource(tmp_path), 1000) == (2,)
    assert made.token_to_id("<SPECIAL_29>") == 29
    served = Served.load(tmp_path)
    assert all(served.decode(served.encode(text, special=False)) == text for text in TEXTS[:-2])
    assert pieces(tmp_path)[30 + ord("a")] == b"a"


def test_an_older_tekken_has_the_usual_special_tokens(tmp_path: Path) -> None:
    tekken(tmp_path, None)
    assert [read_tokenizer(tmp_path).token_to_id(name) for name in ("[INST]", "[TOOL_CONTENT]")] == [3, 19]


def test_tiktoken_as_kimi_has_it(tmp_path: Path) -> None:
    known = ranks()
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in known.items()]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))
    first = len(known)
    named = {first: ("[BOS]", True), first + 2: ("<|im_end|>", True), first + 5: ("<|tool|>", False)}
    added = {str(id): {"content": name, "special": special} for id, (name, special) in named.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    made = read_tokenizer(tmp_path)
    assert made.encode("a<|im_end|><|tool|>").ids == [ord("a"), first + 2, first + 5]
    assert made.token_to_id(f"<|reserved_token_{first + 255}|>") == first + 255
    served = Served.load(tmp_path)
    assert read_tokenizer(tmp_path).to_str() == made.to_str(), "from the cache"
    assert served.decode(served.encode("a<|im_end|><|tool|>")) == "a<|tool|>"
    assert all(served.decode(made.encode(text).ids) == text for text in TEXTS)
    cuts = of_kimi(tmp_path / "tiktoken.model", {}).pre_tokenizer.pre_tokenize_str("Don't 1234中文kana!\n x")
    assert [end - start for _, (start, end) in cuts] == [5, 1, 3, 1, 2, 4, 2, 2]


@pytest.mark.parametrize("kind", [1, 2])
def test_sentence_pieces(tmp_path: Path, kind: int) -> None:
    sentence_model(tmp_path, kind)
    made = read_tokenizer(tmp_path)
    assert made.encode("ab").tokens == ["<s>", "▁ab"]
    assert made.encode("ab é", add_special_tokens=False).tokens == ["▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert made.encode("<own>a</s>", add_special_tokens=False).tokens[0] == "<own>"
    assert made.encode("  ab", add_special_tokens=False).tokens == ["▁", "▁", "▁ab"]
    served = Served.load(tmp_path)
    assert served.decode(served.encode("ab  é ba")) == "ab  é ba"
    assert pieces(tmp_path)[made.token_to_id("<0xC3>")] == b"\xc3"


def test_what_a_sentence_piece_model_may_say(tmp_path: Path) -> None:
    sentence_model(tmp_path, 2, prefix=False)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": False, "add_eos_token": True, "eos_token": "</s>"})
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<end>": len(PIECES) + len(BYTES) + len(WORDS)}))
    assert read_tokenizer(tmp_path).encode("abab<end>").tokens == ["abab", "<end>", "</s>"]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<end>": 9999}))
    with pytest.raises(ConfigError, match="'<end>' cannot have the id 9999"):
        read_tokenizer(tmp_path)


def test_broken_models_are_refused(tmp_path: Path) -> None:
    sentence_model(tmp_path, 3)
    with pytest.raises(ConfigError, match="neither BPE nor Unigram"):
        read_tokenizer(tmp_path)
    for broken in (b"", b"aGk= 0\n", (tmp_path / "tokenizer.model").read_bytes()[:-3]):
        (tmp_path / "tokenizer.model").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"tokenizer.model is no SentencePiece model"):
            read_tokenizer(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ConfigError, match="tekken.json cannot be loaded"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2TokenizerFast", "OtherTokenizer"])
def test_a_vocabulary_with_merges(tmp_path: Path, name: str) -> None:
    original: Tokenizer = tokenizer_families.qwen() if "Qwen" in name else tokenizer_families.gpt2()
    assert isinstance(original.model, models.BPE)
    original.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    if name == "OtherTokenizer":
        with pytest.raises(ConfigError, match="OtherTokenizer, the tokenizer_class of"):
            read_tokenizer(tmp_path)
        return
    made = read_tokenizer(tmp_path)
    for text in TEXTS[:-2]:
        assert made.encode(text).ids == original.encode(text, add_special_tokens=False).ids


def test_a_folder_of_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((NANO / "config.json").read_text())
    (tmp_path / "model-Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="GGUF files are not read"):
        check_model(str(tmp_path))
    with pytest.raises(ConfigError, match="has no tokenizer"):
        check_model(str(tmp_path), "dummy")


# --- the cache -------------------------------------------------------------------------------------------


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "eyas" / "tokenizers").iterdir())


def test_a_tokenizer_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tekken(tmp_path, None)
    made = read_tokenizer(tmp_path)
    (file,) = kept(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(byte_ranks, "of_tekken", None)
        again = read_tokenizer(tmp_path)
        assert again.to_str() == made.to_str()
        assert [again.encode(text).ids for text in TEXTS] == [made.encode(text).ids for text in TEXTS]
        (tmp_path / "tekken.json").rename(tmp_path / "moved")
        (tmp_path / "other").mkdir()
        (tmp_path / "moved").rename(tmp_path / "other" / "tekken.json")
        assert read_tokenizer(tmp_path / "other").to_str() == made.to_str(), "wherever it lies"
    (tmp_path / "other" / "tokenizer_config.json").write_text("{}")
    read_tokenizer(tmp_path / "other")
    assert len(kept(tmp_path)) == 2, "of other files"
    assert file in kept(tmp_path)


@pytest.mark.parametrize("broken", [b"", b'{"version": "1.0"', b"\xff", b"[]"])
def test_what_cannot_be_read_in_the_cache_is_made_again(tmp_path: Path, broken: bytes) -> None:
    tekken(tmp_path, None)
    made = read_tokenizer(tmp_path)
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(broken)
    assert read_tokenizer(tmp_path).to_str() == made.to_str()
    assert file.read_bytes() == whole and kept(tmp_path) == [file]


def test_without_a_cache_each_process_converts(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    tekken(tmp_path, None)
    assert read_tokenizer(tmp_path).to_str() == read_tokenizer(tmp_path).to_str()
    assert named_ends(TextSource(tmp_path), 1000) == (2,)


@pytest.mark.parametrize("family", tokenizer_families.FAMILIES)
def test_a_decoder_is_the_one_that_a_whole_tokenizer_writes(family: str) -> None:
    made = tokenizer_families.FAMILIES[family]()
    assert decoder_of(made) == json.loads(made.to_str())["decoder"]
    made.decoder = None
    assert decoder_of(made) is None
