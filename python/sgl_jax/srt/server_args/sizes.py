"""Numbers as people type them on a command line."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)")
_FACTOR: dict[str, int] = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


def parse_size(text: str) -> int:
    """``"100k"`` -> 100000, ``"4K"`` -> 4096, ``"1.5k"`` -> 1500, ``"-1"`` -> -1.

    Lower-case suffixes are decimal, upper-case ones binary, as in SGLang and vLLM. Raises ValueError on anything else,
    also when the result is not a whole number.
    """
    match = _SIZE.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a number such as 4096, 100k (100000) or 4K (4096)")
    number, suffix = match.groups()
    whole, _, fraction = number.partition(".")
    value, rest = divmod(int(whole + fraction) * _FACTOR[suffix], int(10 ** len(fraction)))
    if rest:
        raise ValueError(f"{text!r} is not a whole number")
    return value
