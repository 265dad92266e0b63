"""Incremental decoding: characters over several tokens, stop strings over several pushes."""

from __future__ import annotations

import pytest

from sgl_jax.srt.managers.detokenizer import IncrementalDetokenizer

TEXT = "naïve 日本語 🙂 done"


class Bytes:
    """A byte tokenizer: id = byte; ids from 1000 on are special tokens."""

    chat_template = None

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=False):
        data = b""
        for token in token_ids:
            if token < 256:
                data += bytes([token])
            elif not skip_special_tokens:
                data += b"<s>"
        return data.decode(errors="replace")

    def apply_chat_template(self, conversation, **kwargs):
        raise NotImplementedError


def run(ids, stops=(), matched=None, size=1, skip=True):
    detok = IncrementalDetokenizer(Bytes(), list(b"prompt"), skip, stops)
    cuts = list(range(0, len(ids), size))
    pieces = [detok.push(ids[i : i + size]) for i in cuts[:-1]]
    pieces.append(detok.finish(ids[cuts[-1] :], matched))
    assert "".join(pieces) == detok.text
    return pieces


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_split_characters_are_never_shown_half(size):
    pieces = run(list(TEXT.encode()), size=size)
    assert "".join(pieces) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte():
    assert run(list("é🙂".encode())) == ["", "é", "", "", "", "🙂"]


def test_a_stop_string_is_held_back_and_cut():
    assert run(list(b"ab STOP"), stops=["STOP"], matched="STOP") == ["a", "b", " ", "", "", "", ""]
    assert run(list(b"ab STAY"), stops=["STOP"]) == ["a", "b", " ", "", "", "STA", "Y"]


def test_text_after_the_stop_string_in_the_same_token_is_cut():
    assert "".join(run(list(b"one END two"), stops=["END"], matched="END", size=100)) == "one "


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_string_before_the_minimum_is_text(size):
    """The scheduler did not heed the first STOP (min_new_tokens); the text is the same streamed and whole."""
    assert "".join(run(list(b"a STOP b STOP"), stops=["STOP"], matched="STOP", size=size)) == "a STOP b "


def test_held_text_comes_out_when_the_end_has_another_reason():
    assert "".join(run(list(b"ab ST"), stops=["STOP"])) == "ab ST"


def test_half_a_character_at_the_end_is_shown_as_replacement():
    assert run(list("a🙂".encode()[:3])) == ["a", "", "\ufffd"]


def test_special_tokens():
    assert "".join(run([97, 1000, 98])) == "ab"
    assert "".join(run([97, 1000, 98], skip=False)) == "a<s>b"


def test_endless_garbage_does_not_grow_the_decoded_window():
    """Bytes that never complete a character are released, so that a push stays cheap."""
    detok = IncrementalDetokenizer(Bytes(), [], True, ())
    for _ in range(500):
        detok.push([0x80])
        assert len(detok._ids) - detok._prefix < 32
    detok.finish([], None)
    assert detok.text == "\ufffd" * 500
