"""The words of a text, as hashes: what a monitor counts, and knows of what a model was trained on.

A word has two letters at least, and may have parts behind apostrophes. In scripts without spaces
each letter is matched with the next one. Words are known by their CRC-32."""

import re
import zlib
from collections.abc import Iterable

# scripts without spaces: Thai and Lao, Burmese, Khmer, kana, Han
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
_LETTER = rf"(?:(?![{UNSPACED}])\w)"
_WORD = re.compile(rf"{_LETTER}{{2,}}(?:['’]{_LETTER}+)*|[{UNSPACED}](?=([{UNSPACED}]?))")


def word_hashes(texts: Iterable[str]) -> list[int]:
    """The hash of each word of the texts, in their order."""
    hashes = list[int]()
    for text in texts:
        for match in _WORD.finditer(text.lower()):
            word = match[0] + (match[1] or "")  # of unspaced scripts each pair of letters is one
            hashes.append(zlib.crc32(word.encode(errors="replace")))
    return hashes
