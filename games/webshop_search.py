"""WebShop's search engine: Lucene 8's English analyzer and BM25. webshop.py is the shop.

A query finds the same products in the same order as in the official program. `words` splits a text by the
rules of UAX #29. `terms` converts words to index terms: no possessive, lower case, no stop words, Porter's
stem. `Index` counts and scores. Two details of Lucene decide the order of close results, so they are exact:
32-bit floats, and document lengths rounded to one byte.

BM25 (k1 = 0.9, b = 0.4) is summed over the words of the query, with repeated words counted each time:

    idf = ln(1 + (N - df + 0.5) / (df + 0.5))
    score = idf tf / (tf + k1 (1 - b + b length / mean length))

N is the number of documents, df the number of documents with the term, tf its count in the document.

Left out: Hebrew quotation marks inside words, Lucene's limit of 1,024 query words, and its query syntax:
every character of a query is text.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

K1, B = np.float32(0.9), np.float32(0.4)
LONGEST_WORD = 255  # Lucene splits longer words
_STOP_WORDS = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with
"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


# --- Text analysis ----------------------------------------------------------------------------------------

# These characters, such as ★ ♡ ☞, are pictographs in Lucene's Unicode 11, but not in newer versions.
_PICTOGRAPHS = (
    r"\u2388\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2763-\u2767"
    r"\U0001F000-\U0001F0FF\U0001F249-\U0001F3FA\U0001F400-\U0001F53D\U0001F546-\U0001F64F"
    r"\U0001F680-\U0001F6FF"
)

# The rules distinguish these classes of characters. The first class that fits counts; the rest is class "o".
_CLASSES = [
    ("J", r"\p{Han}"),
    ("h", r"\p{Hiragana}"),
    ("A", r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}]"),
    ("N", r"[\p{WB=Numeric}\uFF10-\uFF19]"),
    ("K", r"\p{WB=Katakana}"),
    ("E", r"\p{WB=ExtendNumLet}"),
    ("S", r"\p{LB=SA}"),  # Thai, Lao, Khmer and others, which write words without blanks between them
    ("m", r"\p{WB=MidLetter}"),
    ("b", r"[\p{WB=MidNumLet}\p{WB=Single_Quote}]"),
    ("u", r"\p{WB=MidNum}"),
    ("z", r"\u200D"),  # joins emoji
    ("V", r"[\uFE0E\uFE0F]"),  # selects the plain or the coloured form of an emoji
    ("k", r"\u20E3"),  # turns the character before it into a keycap
    ("G", r"\p{Emoji_Modifier}"),
    ("x", r"[\p{WB=Extend}\p{WB=Format}]"),
    ("R", r"\p{WB=Regional_Indicator}"),
    ("p", r"[#*]"),
    ("B", r"\p{Emoji_Modifier_Base}"),
    ("M", rf"[\p{{Extended_Pictographic}}{_PICTOGRAPHS}]"),
]


class _ClassOf(dict):
    """Map code points to the letters of their classes, for str.translate. Filled on demand."""

    def __missing__(self, code_point: int) -> str:
        import regex

        letter = next((name for name, pattern in _CLASSES if regex.match(pattern, chr(code_point))), "o")
        self[code_point] = letter
        return letter


_class_of = _ClassOf()


def _word_pattern() -> re.Pattern:
    """Compile the rules of UAX #29 and Lucene's rules for emoji, over the letters of classes.

    No part of the pattern backtracks far, so the time to match is linear.
    """
    extend = "xzVk"  # characters of these classes belong to the character before them
    x = f"[{extend}]"
    letters = f"A[A{extend}]*(?:(?:E[E{extend}]*|[mb]{x}*)A[A{extend}]*)*"
    numbers = f"N[N{extend}]*(?:(?:E[E{extend}]*|[bu]{x}*)N[N{extend}]*)*"
    katakana = f"K[K{extend}]*(?:E[E{extend}]*K[K{extend}]*)*"
    run = f"(?:{katakana}|(?:{letters}|{numbers})+)"
    underscores = f"(?:E{x}*){{0,{LONGEST_WORD}}}"
    word = f"{underscores}{run}(?:E[E{extend}]*{run})*(?:E{x}*)*"
    joiners = f"z{{0,{LONGEST_WORD}}}"
    tail = f"(?:[xk]|z(?!{joiners}[MBG]))*"
    emoji = f"(?:(?:{joiners}B{tail})?G{tail}|{joiners}[MB]{tail}V?)"
    emojis = f"{emoji}(?:z{emoji})*|p[xz]*V?k[xzk]*|R{x}*R{x}*"
    return re.compile(f"{word}|[Jh]{x}*|(?:S{x}*)+|{emojis}")


_WORD = _word_pattern()


def words(text: str) -> list[str]:
    """Split a text into words: "Women's 2.5x4 T-Shirt" -> ["Women's", "2.5x4", "T", "Shirt"]."""
    spans = [match.span() for match in _WORD.finditer(text.translate(_class_of))]
    out = [text[start:end] for start, end in spans]
    if any(len(word) > LONGEST_WORD for word in out):
        pieces = []
        for word in out:
            pieces += [word[i : i + LONGEST_WORD] for i in range(0, len(word), LONGEST_WORD)]
        return pieces
    return out


@lru_cache(maxsize=1)
def _stemmer():
    from nltk.stem.porter import PorterStemmer

    return PorterStemmer(PorterStemmer.MARTIN_EXTENSIONS)


def _term(word: str) -> str | None:
    """Convert a word to its index term, the stem in lower case. Returns None for a stop word."""
    if word[-2:] in ("'s", "'S", "’s", "’S", "＇s", "＇S"):
        word = word[:-2]
    word = word.lower()
    return None if word in STOP_WORDS else _stemmer().stem(word, to_lowercase=False)


_cached_term = lru_cache(maxsize=65536)(_term)


def terms(text: str) -> list[str]:
    """Split a text into index terms: "The women's RUNNING shoes" -> ["women", "run", "shoe"]."""
    return [term for word in words(text) if (term := _cached_term(word)) is not None]


# --- BM25 -------------------------------------------------------------------------------------------------


def _rounded_lengths(lengths: np.ndarray) -> np.ndarray:
    """Round document lengths as Lucene does to store them in one byte.

    Lengths up to 40 are exact. Of a larger length minus 24, only the four leading bits remain.
    """
    excess = np.maximum(lengths - 24, 0)
    dropped = np.maximum(np.frexp(excess.astype(np.float64))[1] - 4, 0)  # frexp gives the number of bits
    return np.where(lengths < 24, lengths, 24 + (excess >> dropped << dropped))


class _TermNumbers(dict):
    """Map words to the numbers of their terms, -1 for stop words. Filled on demand."""

    def __init__(self):
        self.vocabulary: dict[str, int] = {}

    def __missing__(self, word: str) -> int:
        term = _term(word)
        number = -1 if term is None else self.vocabulary.setdefault(term, len(self.vocabulary))
        self[word] = number
        return number


def _counted(found: array, ends: array, first: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Count the terms of a block of documents.

    found: the term numbers of all documents. ends: where each document ends. first: the number of the first
    document. Returns the postings [terms, documents, counts], sorted by term, and the document lengths.
    """
    term = np.frombuffer(found, np.int32)
    document = np.repeat(np.arange(len(ends)), np.diff(np.frombuffer(ends, np.int64), prepend=0))
    document, term = document[term >= 0], term[term >= 0]
    lengths = np.bincount(document, minlength=len(ends))
    pairs, counts = np.unique(term.astype(np.int64) << 32 | document + first, return_counts=True)
    postings = [(pairs >> 32).astype(np.int32), pairs.astype(np.int32), counts.astype(np.int32)]
    return postings, lengths


class Index:
    """An index of fixed documents for BM25.

    It is built in blocks of documents, to limit the memory. The time is linear in the length of the text,
    except for sorting each block.
    """

    BLOCK = 4_000_000  # words

    def __init__(self, documents: Iterable[str], names: Sequence[str]):
        """Build the index. `names` orders documents with equal scores, as in the official program.

        Raises ValueError if there are not as many names as documents.
        """
        numbers = _TermNumbers()
        blocks = []
        lengths = [np.zeros(0, np.int64)]  # of the documents, by block
        first = 0  # the number of the block's first document
        found, ends = array("i"), array("q")  # the terms of the block, and where each document ends
        for text in documents:
            found.extend([numbers[word] for word in words(text)])
            ends.append(len(found))
            if len(found) >= self.BLOCK:
                block, length = _counted(found, ends, first)
                blocks.append(block)
                lengths.append(length)
                first += len(ends)
                found, ends = array("i"), array("q")
        if ends:
            block, length = _counted(found, ends, first)
            blocks.append(block)
            lengths.append(length)

        self.vocabulary = numbers.vocabulary
        length = np.concatenate(lengths)
        self.size = len(length)
        if self.size != len(names):
            raise ValueError(f"{self.size} documents and {len(names)} names: give one name for each document")
        self._rank = np.empty(self.size, np.int32)
        self._rank[np.argsort(np.array(names, dtype=object), kind="stable")] = np.arange(self.size)
        self._merge(blocks, length)

    def _merge(self, blocks: list, length: np.ndarray) -> None:
        """Merge the blocks to one list of postings for each term, and empty them to free their memory.

        The postings of a term are its documents, and for each of them 1 + tf / (k1 (1 - b + ...)).
        """
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
        free = self._starts[:-1].copy()  # the place of the next posting of each term
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
        """Find the k best documents that contain a term of the query.

        Returns their numbers and their scores, best first.
        """
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
