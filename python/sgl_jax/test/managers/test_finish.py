"""When a request ends: ids, strings, length, and who wins."""

from __future__ import annotations

import pytest

from sgl_jax.srt.managers.finish import StopStrings, abort_reason, finish_reason, token_finish
from sgl_jax.srt.managers.io_struct import SamplingParams
from sgl_jax.srt.managers.request import Req


class Letters:
    """Id 3 + i decodes to the i-th letter; 0..2 are special."""

    def decode(self, token_ids, skip_special_tokens=False):
        special = "" if skip_special_tokens else "?"
        return "".join(special if t < 3 else chr(ord("a") + t - 3) for t in token_ids)


def ids(text):
    return [ord(c) - ord("a") + 3 for c in text]


def make(output, **sampling):
    req = Req("r", "", [5, 6], SamplingParams(**sampling), eos_token_ids={2})
    req.output_ids = list(output)
    return req


@pytest.mark.parametrize(
    ("output", "sampling", "want"),
    [
        ([9, 2], {}, ("stop", 2)),
        ([9, 2], {"ignore_eos": True}, None),
        ([9, 2], {"min_new_tokens": 3}, None),
        ([9, 8], {"stop_token_ids": [8]}, ("stop", 8)),
        ([9, 8], {"stop_token_ids": [8], "ignore_eos": True}, ("stop", 8)),
        ([9, 8], {"max_new_tokens": 2}, ("length", None)),
        ([9, 2], {"max_new_tokens": 2}, ("stop", 2)),
        ([], {"max_new_tokens": 0}, None),
    ],
)
def test_token_finish(output, sampling, want):
    reason = token_finish(make(output, **sampling))
    assert (None if reason is None else (reason.type, reason.matched)) == want


@pytest.mark.parametrize(
    ("text", "stop", "want"),
    [
        ("hello", ["ll"], "ll"),
        ("hello", ["lo", "o"], "lo"),
        ("hello", ["x"], None),
        ("a" * 40 + "stop", ["stop"], "stop"),
        ("hello", [""], None),
    ],
)
def test_stop_strings(text, stop, want):
    reason = StopStrings(Letters).find(make(ids(text), stop=stop))
    assert (None if reason is None else reason.matched) == want


@pytest.mark.parametrize(
    ("text", "minimum", "want"),
    [
        ("axby", 2, None),  # complete before the minimum: no stop, neither at the minimum ...
        ("axbyc", 4, None),  # ... nor later
        ("axbyax", 4, "ax"),  # again, with the newest token
        ("abax", 4, "ax"),  # completed by the token that reaches the minimum
        ("xxx", 3, "xx"),  # overlapping the earlier one
    ],
)
def test_stop_strings_before_the_minimum_do_not_count(text, minimum, want):
    reason = StopStrings(Letters).find(make(ids(text), stop=["ax", "xx"], min_new_tokens=minimum))
    assert (None if reason is None else reason.matched) == want


def test_special_tokens_do_not_break_a_stop_string():
    req = make([*ids("ab"), 0, 0, *ids("c")], stop=["bc"])
    assert StopStrings(Letters).find(req).matched == "bc"


def test_order_of_reasons():
    """An abort wins; a stop by id wins over a string; a string wins over the length."""
    req = make([*ids("ab"), 2], stop=["ab"], max_new_tokens=3)
    assert finish_reason(req, StopStrings(Letters)).matched == 2
    req = make(ids("ab"), stop=["ab"], max_new_tokens=2)
    assert finish_reason(req, StopStrings(Letters)).matched == "ab"
    req.to_finish = abort_reason("gone")
    assert finish_reason(req, StopStrings(Letters)).type == "abort"


def test_tokenizer_is_loaded_once_and_only_when_needed():
    loads = []
    stops = StopStrings(lambda: loads.append(1) or Letters())
    assert stops.find(make(ids("ab"))) is None and loads == []
    stops.find(make(ids("ab"), stop=["x"]))
    stops.find(make(ids("ab"), stop=["x"]))
    assert loads == [1]


def test_without_a_tokenizer_it_says_so():
    with pytest.raises(RuntimeError, match="built without one"):
        StopStrings(None).find(make(ids("ab"), stop=["x"]))


def test_check_finished_keeps_the_first_reason():
    req = make([9, 2])
    assert req.check_finished() and req.finished_reason.type == "stop"
    req.to_finish = abort_reason("late")
    assert req.check_finished() and req.finished_reason.type == "stop"
