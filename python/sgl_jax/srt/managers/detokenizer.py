"""Token ids -> text, piece by piece.

A token may end inside a UTF-8 character, and a stop string may be half there: such text is held back until it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl_jax.srt.managers.frontend.tokenizer import Tokenizer

_CONTEXT = 5  # prompt tokens that fix the spacing of the first output token
_REPLACEMENT = "\ufffd"
_MAX_PENDING = 8  # a character has at most 4 bytes: a longer undecided tail is not one character


class IncrementalDetokenizer:
    """Text of one sequence. ``text`` only ever grows, and never holds a part of a stop string or of a character.

    ``push`` costs a decode of a few tokens, whatever the length so far.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool, stops: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stops = tuple(stops)
        # self._ids = context + output tokens. [0, prefix) dropped from view, [prefix, read) decoded and in the text,
        # [read, end) undecided.
        self._ids: list[int] = list(prompt[-_CONTEXT:])
        self._prefix = 0
        self._read = len(self._ids)
        self._prefix_text: str | None = None
        self._held = ""
        self.text = ""

    def push(self, new_ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that became certain."""
        self._ids.extend(new_ids)
        self._held += self._decode_certain()
        keep = self._possible_stop(self._held)
        return self._release(len(self._held) - keep)

    def finish(self, last_ids: Sequence[int], matched: int | str | None) -> str:
        """The last tokens and whatever was held, cut before a matched stop string.

        The stop string was completed by the last token (one that was complete earlier, before ``min_new_tokens``, is text). A
        matched stop token is no text: leave it out.
        """
        self._ids.extend(last_ids[:-1])
        self._held += self._decode_certain()
        known = len(self._held)
        self._ids.extend(last_ids[-1:])
        self._held += self._decode_certain()
        before = self._decode(self._prefix, self._read)
        self._held += self._decode(self._prefix, len(self._ids))[len(before) :]
        end = len(self._held)
        if isinstance(matched, str) and matched:
            newest = self._held.find(matched, max(0, known - len(matched) + 1))
            at = newest if newest >= 0 else self._held.find(matched)
            end = at if at >= 0 else end
        piece = self._release(end)
        self._held = ""
        return piece

    def _release(self, count: int) -> str:
        piece, self._held = self._held[:count], self._held[count:]
        self.text += piece
        return piece

    def _decode(self, start: int, end: int) -> str:
        if start == end:
            return ""
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip)

    def _decode_certain(self) -> str:
        """Moves [prefix, read) forward over tokens whose text can no longer change."""
        end = len(self._ids)
        if end == self._read:
            return ""
        if self._prefix_text is None:
            self._prefix_text = self._decode(self._prefix, self._read)
        text = self._decode(self._prefix, end)
        if text.endswith(_REPLACEMENT):
            end, text = self._cut_undecided(end, text)
        piece = text[len(self._prefix_text) :]
        if not piece:
            return ""
        self._prefix, self._read, self._prefix_text = self._read, end, None
        return piece

    def _cut_undecided(self, end: int, text: str) -> tuple[int, str]:
        """End and text of the certain part when the tail may be half a character; nothing when all of it may be."""
        if end - self._read > _MAX_PENDING:
            for cut in range(end - 4, self._read, -1):
                part = self._decode(self._prefix, cut)
                if text.startswith(part):
                    return cut, part
        return self._read, ""

    def _possible_stop(self, text: str) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop), len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
