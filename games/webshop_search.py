"""WebShop's search engine: Lucene 8's English analyzer and its BM25, so that the same query finds the same
products in the same order (webshop.py is the shop).

`words` cuts a text as UAX #29 does, `terms` makes of each word what Lucene indexes (possessive off, lower
case, no stop words, Porter's stem), `Index` counts and scores. Exact down to Lucene's 32-bit floats and its
document lengths rounded to one byte, because both decide the order of close results.

BM25 (k1 = 0.9, b = 0.4), summed over the query's words, a repeated word counted each time:

    idf = ln(1 + (N - df + 0.5) / (df + 0.5)),  score = idf tf / (tf + k1 (1 - b + b length / mean length))

Left out: Hebrew's quotation marks inside words, Lucene's limit of 1,024 query words, and all its query syntax
(none is used here: every character of a query is text).
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

K1, B = np.float32(0.9), np.float32(0.4)
LONGEST_WORD = 255  # Lucene cuts longer ones
_STOP_WORDS = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


# --- Text analysis ----------------------------------------------------------------------------------------

# Pictographs of Lucene's Unicode (11) that a newer Unicode no longer counts as such: ★ ♡ ☞ ...
_PICTOGRAPHS = (
    r"\u2388\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2763-\u2767"
    r"\U0001F000-\U0001F0FF\U0001F249-\U0001F3FA\U0001F400-\U0001F53D\U0001F546-\U0001F64F"
    r"\U0001F680-\U0001F6FF"
)

# One letter for each class of characters that the rules tell apart; the first that fits. All others are "o".
_CLASSES = [
    ("J", r"\p{Han}"),
    ("h", r"\p{Hiragana}"),
    ("A", r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}]"),
    ("N", r"[\p{WB=Numeric}\uFF10-\uFF19]"),
    ("K", r"\p{WB=Katakana}"),
    ("E", r"\p{WB=ExtendNumLet}"),
    ("S", r"\p{LB=SA}"),  # Thai, Lao, Khmer, ...: runs without blanks
    ("m", r"\p{WB=MidLetter}"),
    ("b", r"[\p{WB=MidNumLet}\p{WB=Single_Quote}]"),
    ("u", r"\p{WB=MidNum}"),
    ("z", r"\u200D"),  # joins emoji
    ("V", r"[\uFE0E\uFE0F]"),  # asks for an emoji's plain or coloured form
    ("k", r"\u20E3"),  # makes a keycap of the character before it
    ("G", r"\p{Emoji_Modifier}"),
    ("x", r"[\p{WB=Extend}\p{WB=Format}]"),
    ("R", r"\p{WB=Regional_Indicator}"),
    ("p", r"[#*]"),
    ("B", r"\p{Emoji_Modifier_Base}"),
    ("M", rf"[\p{{Extended_Pictographic}}{_PICTOGRAPHS}]"),
]


class _ClassOf(dict):
    """Code point -> its letter, found when first seen: a table for str.translate."""

    def __missing__(self, code_point: int) -> str:
        import regex

        letter = next((name for name, which in _CLASSES if regex.match(which, chr(code_point))), "o")
        self[code_point] = letter
        return letter


_class_of = _ClassOf()


def _word_pattern() -> re.Pattern:
    """UAX #29 and Lucene's emoji rules over class letters. No part can fail late, so time stays linear."""
    x = "[xzVk]"  # these belong to the character before them
    letters = f"A[A{x[1:-1]}]*(?:(?:E[E{x[1:-1]}]*|[mb]{x}*)A[A{x[1:-1]}]*)*"
    numbers = f"N[N{x[1:-1]}]*(?:(?:E[E{x[1:-1]}]*|[bu]{x}*)N[N{x[1:-1]}]*)*"
    katakana = f"K[K{x[1:-1]}]*(?:E[E{x[1:-1]}]*K[K{x[1:-1]}]*)*"
    run = f"(?:{katakana}|(?:{letters}|{numbers})+)"
    underscores = f"(?:E{x}*){{0,{LONGEST_WORD}}}"
    word = f"{underscores}{run}(?:E[E{x[1:-1]}]*{run})*(?:E{x}*)*"
    joiners = f"z{{0,{LONGEST_WORD}}}"
    tail = f"(?:[xk]|z(?!{joiners}[MBG]))*"
    emoji = f"(?:(?:{joiners}B{tail})?G{tail}|{joiners}[MB]{tail}V?)"
    emojis = f"{emoji}(?:z{emoji})*|p[xz]*V?k[xzk]*|R{x}*R{x}*"
    return re.compile(f"{word}|[Jh]{x}*|(?:S{x}*)+|{emojis}")


_WORD = _word_pattern()


def words(text: str) -> list[str]:
    """The words of a text, as they stand: "Women's 2.5x4 T-Shirt" -> Women's, 2.5x4, T, Shirt."""
    spans = [match.span() for match in _WORD.finditer(text.translate(_class_of))]
    out = [text[start:end] for start, end in spans]
    if any(len(word) > LONGEST_WORD for word in out):
        step = LONGEST_WORD
        out = [word[i : i + step] for word in out for i in range(0, len(word), step)]
    return out


@lru_cache(maxsize=1)
def _stemmer():
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer(PorterStemmer.MARTIN_EXTENSIONS)


def _term(word: str) -> str | None:
    """What is indexed of a word: its stem in lower case; None for a stop word."""
    if word[-2:] in ("'s", "'S", "’s", "’S", "＇s", "＇S"):
        word = word[:-2]
    word = word.lower()
    return None if word in STOP_WORDS else _stemmer().stem(word, to_lowercase=False)


_cached_term = lru_cache(maxsize=65536)(_term)


def terms(text: str) -> list[str]:
    return [term for word in words(text) if (term := _cached_term(word)) is not None]


# --- BM25 -------------------------------------------------------------------------------------------------


def _rounded_lengths(lengths: np.ndarray) -> np.ndarray:
    """Document lengths as Lucene stores them in one byte: exact up to 40, then four leading bits of what
    exceeds 24."""
    excess = np.maximum(lengths - 24, 0)
    dropped = np.maximum(np.frexp(excess.astype(np.float64))[1] - 4, 0)  # frexp: the number of bits
    return np.where(lengths < 24, lengths, 24 + (excess >> dropped << dropped))


class _TermNumbers(dict):
    """Word -> number of its term, -1 for a stop word; a new word is analysed once."""

    def __init__(self):
        self.vocabulary: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        term = _term(word)
        number = -1 if term is None else self.vocabulary.setdefault(term, len(self.vocabulary))
        self[word] = number
        return number


class Index:
    """BM25 over documents given once; built in blocks, in time linear in the text but for sorting a block."""

    BLOCK = 4_000_000  # words

    def __init__(self, documents: Iterable[str], names: Sequence[str]):
        """`names` decide between equal scores (the smaller string first), as Lucene was told to."""
        numbers = _TermNumbers()
        blocks, lengths = [], []
        found, ends = array("i"), array("q")

        def close_block():
            nonlocal found, ends
            if not ends:
                return
            term = np.frombuffer(found, np.int32)
            document = np.repeat(np.arange(len(ends)), np.diff(np.frombuffer(ends, np.int64), prepend=0))
            document, term = document[term >= 0], term[term >= 0]
            first = sum(map(len, lengths))
            lengths.append(np.bincount(document, minlength=len(ends)))
            pairs, counts = np.unique(term.astype(np.int64) << 32 | document + first, return_counts=True)
            blocks.append([(pairs >> 32).astype(np.int32), pairs.astype(np.int32), counts.astype(np.int32)])
            found, ends = array("i"), array("q")

        for text in documents:
            found.extend([numbers[word] for word in words(text)])
            ends.append(len(found))
            if len(found) >= self.BLOCK:
                close_block()
        close_block()

        self.vocabulary = numbers.vocabulary
        length = np.concatenate([*lengths, np.zeros(0, np.int64)])
        self.size = len(length)
        if self.size != len(names):
            raise ValueError(f"{self.size} documents and {len(names)} names: each document needs its own")
        self._rank = np.empty(self.size, np.int32)
        self._rank[np.argsort(np.array(names, dtype=object), kind="stable")] = np.arange(self.size)
        self._merge(blocks, length)

    def _merge(self, blocks: list, length: np.ndarray) -> None:
        """One list of postings for each term: its documents, and for each 1 + tf / (k1 (1 - b + ...))."""
        n_terms = len(self.vocabulary)
        frequencies = np.zeros(n_terms, np.int64)
        for term, _, _ in blocks:
            frequencies += np.bincount(term, minlength=n_terms)
        self._starts = np.concatenate([[0], np.cumsum(frequencies)])
        self._documents = np.empty(self._starts[-1], np.int32)
        self._divisors = np.empty(self._starts[-1], np.float32)

        mean = np.float32(max(length.sum(), 1) / max(self.size, 1))
        rounded = _rounded_lengths(length).astype(np.float32)
        inverse = np.float32(1) / (K1 * ((np.float32(1) - B) + B * rounded / mean))
        free = self._starts[:-1].copy()  # where each term's next posting goes
        for block in blocks:
            term, document, count = block
            within = np.bincount(term, minlength=n_terms)
            offset = np.arange(len(term)) - (np.cumsum(within) - within)[term]
            place = free[term] + offset
            self._documents[place] = document
            self._divisors[place] = np.float32(1) + count.astype(np.float32) * inverse[document]
            free += within
            block.clear()
        self._idf = np.log(1 + (self.size - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)

    def search(self, query: str, k: int = 50) -> tuple[list[int], list[float]]:
        """The numbers of the best k documents and their scores, best first; fewer where fewer match."""
        sums = np.zeros(self.size)
        for term, count in Counter(terms(query)).items():
            number = self.vocabulary.get(term)
            if number is not None:
                postings = slice(self._starts[number], self._starts[number + 1])
                weight = np.float32(count) * self._idf[number]
                sums[self._documents[postings]] += weight - weight / self._divisors[postings]
        scores = sums.astype(np.float32)
        hits = np.flatnonzero(scores)
        if len(hits) > k > 0:
            cut = np.partition(scores[hits], -k)[-k]
            hits = hits[scores[hits] >= cut]
        best = hits[np.lexsort((self._rank[hits], -scores[hits]))][:k]
        return best.tolist(), scores[best].tolist()
