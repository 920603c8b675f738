"""Stages of Spark ML that make words of text, and vectors of words and categories."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .columns import Batch, Column, Numbers, Vectors, Words, vectors_of

_SEED = 42
_MASK = 0xFFFFFFFF


def _hash_of(text: str) -> int:
    """Return the hash of a text's UTF-8, as a signed 32-bit number."""
    data = text.encode("utf-8", "surrogatepass")
    mixed, whole = _SEED, len(data) & ~3
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        mixed ^= _scrambled(word)
        mixed = ((mixed << 13) | (mixed >> 19)) & _MASK
        mixed = (mixed * 5 + 0xE6546B64) & _MASK
    if len(data) > whole:
        mixed ^= _scrambled(int.from_bytes(data[whole:], "little"))
    mixed ^= len(data)
    mixed ^= mixed >> 16
    mixed = (mixed * 0x85EBCA6B) & _MASK
    mixed ^= mixed >> 13
    mixed = (mixed * 0xC2B2AE35) & _MASK
    mixed ^= mixed >> 16
    return mixed - (1 << 32) if mixed >> 31 else mixed


def _scrambled(word: int) -> int:
    word = (word * 0xCC9E2D51) & _MASK
    word = ((word << 15) | (word >> 17)) & _MASK
    return (word * 0x1B873593) & _MASK


def place_of(text: str, size: int) -> int:
    """Return the place of a text among ``size``."""
    return _hash_of(text) % size  # not negative in Python


_SPACE = re.compile(r"\s", re.ASCII)


@dataclass(frozen=True)
class Tokenizer:
    """Words in lower case; see `pyspark.ml.feature.Tokenizer`.

    Attributes:
        input: column of text.
        output: the column to add.
    """

    input: str
    output: str

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    def __call__(self, batch: Batch) -> None:
        texts = batch.words(self.input, lists=False)
        batch.check(self.input, texts.valid, "it must be text")
        words = [_split(_SPACE, text.lower()) for text in texts.data]
        batch.columns[self.output] = Words(words, lists=True)


@dataclass(frozen=True)
class RegexTokenizer:
    """Words by a regular expression; see `pyspark.ml.feature.RegexTokenizer`.

    Attributes:
        input: column of text.
        output: the column to add.
        pattern: what separates words, or what words are.
        gaps: whether it is what separates them.
        lower: whether they are made lower case.
        min_length: the shortest words that are kept, in characters.
    """

    input: str
    output: str
    pattern: str
    gaps: bool
    lower: bool
    min_length: int

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.ASCII)

    def __call__(self, batch: Batch) -> None:
        texts = batch.words(self.input, lists=False)
        batch.check(self.input, texts.valid, "it must be text")
        words = [self._words(text) for text in texts.data]
        batch.columns[self.output] = Words(words, lists=True)

    def _words(self, text: str) -> list[str]:
        text = text.lower() if self.lower else text
        tokens = _split(self._compiled, text) if self.gaps else self._compiled.findall(text)
        return [word for word in tokens if _java_length(word) >= self.min_length]


def _java_length(word: str) -> int:
    """Return the length in Java's characters, of which rare ones take two."""
    return len(word) + sum(letter > "\uffff" for letter in word)


def _split(pattern: re.Pattern[str], text: str) -> list[str]:
    """Split as Java does: empty strings at the end are left out, unless there is nothing else."""
    parts = pattern.split(text)
    if len(parts) == 1:
        return parts
    while parts and not parts[-1]:
        parts.pop()
    return parts


@dataclass(frozen=True)
class StopWordsRemover:
    """Lists of words without some; see `pyspark.ml.feature.StopWordsRemover`.

    Attributes:
        inputs: columns of lists of words.
        outputs: the columns to add.
        words: what is left out; in lower case unless ``case_sensitive``.
        case_sensitive: whether upper and lower case count.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    words: tuple[str, ...]
    case_sensitive: bool

    @property
    def adds(self) -> tuple[str, ...]:
        return self.outputs

    @cached_property
    def _stops(self) -> frozenset[str]:
        return frozenset(self.words)

    def __call__(self, batch: Batch) -> None:
        for name, output in zip(self.inputs, self.outputs, strict=True):
            lists = _lists_of(batch, name)
            left = [[word for word in words if self._stays(word)] for words in lists.data]
            batch.columns[output] = Words(left, lists=True)

    def _stays(self, word: str) -> bool:
        return (word if self.case_sensitive else word.lower()) not in self._stops


@dataclass(frozen=True)
class NGram:
    """Words that follow each other, joined by blanks; see `pyspark.ml.feature.NGram`.

    Attributes:
        input: column of lists of words.
        output: the column to add.
        count: how many words each has.
    """

    input: str
    output: str
    count: int

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    def __call__(self, batch: Batch) -> None:
        lists = _lists_of(batch, self.input)
        batch.columns[self.output] = Words([self._joined(one) for one in lists.data], lists=True)

    def _joined(self, words: Sequence[str]) -> list[str]:
        starts = range(len(words) - self.count + 1)
        return [" ".join(words[start : start + self.count]) for start in starts]


@dataclass(frozen=True)
class HashingTF:
    """Term frequencies by hashes of words; see `pyspark.ml.feature.HashingTF`.

    Attributes:
        input: column of lists of words.
        output: the column to add.
        size: elements of a vector.
        binary: whether to tell only that a word comes.
    """

    input: str
    output: str
    size: int
    binary: bool

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    def __call__(self, batch: Batch) -> None:
        lists = _lists_of(batch, self.input)
        counted = []
        for words in lists.data:
            counts: dict[int, float] = {}
            for word in words:
                place = place_of(word, self.size)
                counts[place] = 1.0 if self.binary else counts.get(place, 0.0) + 1.0
            counted.append(counts)
        batch.columns[self.output] = _of_counts(self.size, counted)


@dataclass(frozen=True)
class CountVectorizer:
    """Term frequencies of a vocabulary; see `pyspark.ml.feature.CountVectorizerModel`.

    Attributes:
        input: column of lists of words.
        output: the column to add.
        vocabulary: the known words.
        min_count: how often a word must come to count: a number, or below 1 a share of the words.
        binary: whether to tell only that a word comes.
    """

    input: str
    output: str
    vocabulary: tuple[str, ...]
    min_count: float
    binary: bool

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.vocabulary)}

    def __call__(self, batch: Batch) -> None:
        lists = _lists_of(batch, self.input)
        counted = []
        for words in lists.data:
            counts: dict[int, float] = {}
            for word in words:
                place = self._places.get(word)
                if place is not None:
                    counts[place] = counts.get(place, 0.0) + 1.0
            least = self.min_count if self.min_count >= 1 else self.min_count * len(words)
            counted.append({p: 1.0 if self.binary else n for p, n in counts.items() if n >= least})
        batch.columns[self.output] = _of_counts(len(self.vocabulary), counted)


@dataclass(frozen=True)
class FeatureHasher:
    """Numbers and categories by the hashes of their names; see `pyspark.ml.feature.FeatureHasher`.

    Attributes:
        inputs: columns of numbers, booleans or text.
        output: the column to add.
        size: elements of a vector.
        categorical: which columns of numbers are categories, as all text and booleans are.
    """

    inputs: tuple[str, ...]
    output: str
    size: int
    categorical: tuple[str, ...]

    @property
    def adds(self) -> tuple[str, ...]:
        return (self.output,)

    def __call__(self, batch: Batch) -> None:
        counted: list[dict[int, float]] = [{} for _ in range(len(batch))]
        numbers = {name: self._is_number(name, batch.column(name)) for name in self.inputs}
        # In the order that Spark adds them up: numbers first.
        for name in sorted(self.inputs, key=lambda name: not numbers[name]):
            column = batch.column(name)
            if numbers[name]:
                place, (data, valid) = place_of(name, self.size), batch.numbers(name)
                shown = valid if valid is not None else np.ones(len(data), bool)
                for counts, value, there in zip(counted, data.tolist(), shown, strict=True):
                    if there:
                        counts[place] = counts[place] + value if place in counts else value
                continue
            for row, counts in enumerate(counted):
                value = column.value(row)
                if value is None:
                    continue
                text = str(value).lower() if isinstance(value, bool) else str(value)
                place = place_of(f"{name}={text}", self.size)
                counts[place] = counts.get(place, 0.0) + 1.0
        batch.columns[self.output] = _of_counts(self.size, counted)

    def _is_number(self, name: str, column: Column) -> bool:
        whole = isinstance(column, Numbers) and column.data.dtype.kind != "b"
        return whole and name not in self.categorical


def _lists_of(batch: Batch, name: str) -> Words:
    """Return a column of lists of words, whose rows all have one."""
    lists = batch.words(name, lists=True)
    batch.check(name, lists.valid, "it must be a list of words")
    return lists


def _of_counts(size: int, counted: Sequence[dict[int, float]]) -> Vectors:
    lengths = [len(counts) for counts in counted]
    total = sum(lengths)

    def flat(values: Iterable[float], dtype: type) -> np.ndarray:
        return np.fromiter(values, dtype, total)

    rows = np.repeat(np.arange(len(counted)), lengths)
    indices = flat((place for counts in counted for place in counts), np.int64)
    data = flat((value for counts in counted for value in counts.values()), np.float64)
    return vectors_of(size, len(counted), rows, indices, data)
