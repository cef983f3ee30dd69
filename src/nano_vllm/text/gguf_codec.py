"""Codec of a GGUF vocabulary: text -> ids as llama.cpp does it, id -> bytes."""

from __future__ import annotations

from ..errors import ModelFileError, UnsupportedModel
from . import pretokenizers, vocabulary
from .spm import SPACE, SentencePieces


def open_codec(metadata: dict) -> tuple["GGUFCodec", vocabulary.Vocabulary, bool, bool]:
    """Codec, vocabulary, add_bos, add_eos of `tokenizer.ggml.*`. UnsupportedModel for another model or pre-tokenizer."""
    vocabulary.check_types(metadata)
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"tokenizer model {model!r} is not supported", "supported are 'gpt2' (BPE) and 'llama' (SentencePiece)"
        )
    spm = model == "llama"
    rule = None if spm else pretokenizers.by_name(metadata.get("tokenizer.ggml.pre"))
    vocab = vocabulary.read(metadata, spm)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", spm))
    if spm:
        scores = metadata.get("tokenizer.ggml.scores")
        if scores is not None and len(scores) < len(vocab.texts):
            raise ModelFileError("the vocabulary lacks scores", f"{len(vocab.texts)} tokens, {len(scores)} scores")
        mergeable = {t: i for t, i in vocab.ids.items() if i not in vocab.control}
        encode = SentencePieces(mergeable, scores, vocab.unk).encode
    else:
        encode = _byte_level_encoder(vocab, metadata, rule)
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", spm or (rule is not None and rule.add_bos)))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    return GGUFCodec(vocab, encode, spm, spm and prefix), vocab, add_bos, add_eos


def _byte_level_encoder(vocab: vocabulary.Vocabulary, metadata: dict, rule: pretokenizers.PreTokenizer):
    """text -> ids by the `tokenizers` library's BPE. Its constructor is faster than parsing a tokenizer.json of our making."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelFileError("the vocabulary has no merges", "tokenizer.ggml.merges is missing")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        core = Tokenizer(models.BPE(vocab=vocab.ids, merges=pairs, ignore_merges=rule.ignore_merges))
    except Exception as error:  # the library raises bare Exception
        raise ModelFileError("the vocabulary's merges do not fit its tokens", str(error)) from None
    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in rule.patterns]
    core.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return lambda text: core.encode(text, add_special_tokens=False).ids


class GGUFCodec:
    """Encodes and spells tokens of a GGUF vocabulary.

    Special tokens are cut out of the text before all else, the longest first, each wherever it stands in what is still uncut.

    Args:
        vocab: the vocabulary.
        encode: plain text -> ids.
        sentencepiece: spelling with ▁ and <0xNN>; else byte-level spelling.
        prefix: a space is put before text that begins the prompt or follows a special token.
    """

    def __init__(self, vocab: vocabulary.Vocabulary, encode, sentencepiece: bool, prefix: bool) -> None:
        self.vocab, self._encode, self.sentencepiece, self.prefix = vocab, encode, sentencepiece, prefix
        self.size = len(vocab.texts)
        by_length = sorted(vocab.control | vocab.literal, key=lambda i: -len(vocab.texts[i].encode()))
        self._cut = [(vocab.texts[i], i) for i in by_length]
        self._cut_plain = [(t, i) for t, i in self._cut if i in vocab.literal]

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of text, without BOS and EOS."""
        return self._join(self._partition([text], self._cut if parse_special else self._cut_plain))

    def encode_segments(self, segments: list[str | int]) -> list[int]:
        """Ids of plain texts and ready ids in turn; no text becomes a control token."""
        return self._join(self._partition(segments, self._cut_plain))

    def bytes_of(self, token: int) -> bytes:
        """Bytes of a token that is no control token; unused tokens have none."""
        text = self.vocab.texts[token]
        if token in self.vocab.byte:
            return bytes([int(text[3:5], 16)]) if len(text) == 6 else b""
        if token in self.vocab.literal or token in self.vocab.control:
            return text.encode()
        if token in self.vocab.blank:
            return b""
        return text.replace(SPACE, " ").encode() if self.sentencepiece else pretokenizers.byte_level(text)

    @staticmethod
    def _partition(parts: list[str | int], cut: list[tuple[str, int]]) -> list[str | int]:
        for special, token in cut:
            if not any(isinstance(p, str) and special in p for p in parts):
                continue
            split: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    split.append(part)
                    continue
                for n, piece in enumerate(part.split(special)):
                    split += ([token] if n else []) + ([piece] if piece else [])
            parts = split
        return parts

    def _join(self, parts: list[str | int]) -> list[int]:
        out: list[int] = []
        fresh = True  # the prompt begins here, or a special token came before
        for part in parts:
            if isinstance(part, int):
                out.append(part)
                fresh = True
            elif part:
                out += self._plain(" " + part if self.prefix and fresh else part)
                fresh = False
        return out

    def _plain(self, text: str) -> list[int]:
        """Ids of plain text. A vocabulary can spell a control token by merges; such a one is taken apart again."""
        ids = self._encode(text)
        if self.vocab.control.isdisjoint(ids):
            return ids
        known, unknown = self.vocab.ids, self.vocab.unk
        out: list[int] = []
        for i in ids:
            apart = [known[c] for c in self.vocab.texts[i] if c in known and known[c] not in self.vocab.control]
            out += [i] if i not in self.vocab.control or i == unknown else apart
        return out
