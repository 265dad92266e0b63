"""``sgl-jax ledger`` against a live HTTP endpoint: tables, verdict, diff, slot owner, exit codes."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from sgl_jax.srt.mem_cache.ledger import build_snapshot
from sgl_jax.test.mem_cache.ledger.test_snapshot import BareCache
from sgl_jax.tools.ledger_view import main


def snapshot(**changes):
    return build_snapshot(BareCache(), 0, []) | changes


@pytest.fixture
def server():
    state = {
        "status": 200,
        "body": {"internal": True, "route": "unified_swa", "idle": True, "ranks": [snapshot()]},
        "seen": [],
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state["seen"].append(urlsplit(self.path))
            body = dict(state["body"])
            query = parse_qs(urlsplit(self.path).query)
            if "slot" in query and state.get("owner"):
                body["slot"] = {"description": state["owner"]}
            data = json.dumps(body).encode()
            self.send_response(state["status"])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    state["url"] = f"127.0.0.1:{httpd.server_port}"
    yield state
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def test_a_sound_ledger_is_a_table_and_a_verdict(server, capsys):
    server["body"]["ranks"] = [snapshot(), snapshot(dp_rank=1, full_available=10, full_tree_evictable=6)]
    assert main([server["url"]]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "route unified_swa, idle, 2 rank(s)"
    assert out[1].split() == [
        *("rank", "pool", "capacity", "free", "evictable", "protected", "requests", "slack", "sum", "faults")
    ]
    assert out[4].split() == ["1", "full", "16", "10", "6", "0", "0", "0", "=", "capacity", "0"]
    assert out[-1] == "sound: every slot has exactly one owner"
    assert server["seen"][0].path == "/get_cache_ledger"


def test_a_violation_is_named_and_exits_1(server, capsys):
    server["body"]["ranks"] = [snapshot(full_available=12)]
    server["body"]["violations"] = ["[dp=0][full] leaked: 1 pages are neither free nor owned slots=[8]"]
    assert main([server["url"]]) == 1
    out = capsys.readouterr().out
    assert (
        "-4" in out
        and "4 leaked" in out
        and "slots=[8]" in out
        and out.endswith("VIOLATED: 2 broken rule(s)\n")
    )


def test_save_diff_and_json(server, capsys, tmp_path):
    saved = tmp_path / "before.json"
    assert main([server["url"], "--save", str(saved)]) == 0
    server["body"]["ranks"] = [snapshot(full_available=10, full_tree_evictable=6)]
    assert main([server["url"], "--diff", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "rank 0  full_available: 16 -> 10 (-6)" in out and "full_tree_evictable: 0 -> 6 (+6)" in out
    assert main([server["url"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"][0]["full_available"] == 10


def test_who_owns_a_slot(server, capsys):
    server["owner"] = "rank 1, swa slot 7 — request: rid a row 0 position 3"
    assert main([server["url"], "--slot", "7", "--pool", "swa", "--rank", "1"]) == 0
    assert server["owner"] in capsys.readouterr().out
    assert server["seen"][-1].query == "slot=7&pool=swa&rank=1"
    server["owner"] = ""
    assert main([server["url"], "--slot", "7"]) == 2
    assert "does not answer questions about a slot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "hint"), [(403, "--enable-cache-report"), (401, "--api-key"), (501, "501")]
)
def test_a_refusal_exits_2_and_says_what_to_do(server, capsys, status, hint):
    server["status"] = status
    assert main([server["url"]]) == 2
    assert hint in capsys.readouterr().err


def test_nobody_there_exits_2(capsys):
    assert main(["127.0.0.1:1", "--timeout", "2"]) == 2
    assert "is the server running there?" in capsys.readouterr().err


def test_an_answer_that_is_no_ledger_exits_2(server, capsys):
    server["body"] = {"hello": 1}
    assert main([server["url"]]) == 2


@pytest.mark.parametrize("flags", [["--pool", "swa"], ["--rank", "0"]])
def test_a_place_without_a_slot_is_refused_before_anything_is_asked(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["127.0.0.1:1", *flags])
    assert stopped.value.code == 2
    assert "--pool and --rank say where --slot N is: add --slot" in capsys.readouterr().err
