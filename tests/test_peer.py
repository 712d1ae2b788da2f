"""The comparison with llama.cpp: its side runs where nothing of ours is, and a side that fails says why."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from flashgap import peer, peer_llama_cpp


def test_the_peers_side_imports_nothing_of_ours():
    tree = ast.parse(Path(peer_llama_cpp.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"__future__", "json", "random", "sys", "time", "llama_cpp"}


def test_ratios_are_over_the_peer_and_paired_by_block(capsys):
    def runs(step_s, first_s):
        return [{"itl_s": [step_s * luck] * 3, "ttft_s": first_s * luck} for luck in (1.0, 1.4, 0.8)]

    theirs = [run | {"version": "9", "system": "AMX"} for run in runs(0.010, 0.1)]
    peer.report({"llama.cpp": theirs, "flash_optimised": runs(0.005, 0.15)})
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Flash, optimised"))
    assert "0.50 [0.50, 0.50]" in row
    assert "1.50 [1.50, 1.50]" in row


def test_a_side_that_fails_is_named_with_its_last_words():
    with pytest.raises(peer.PeerError, match=r"llama\.cpp: ended with 1: boom"):
        peer._json_of("llama.cpp", [sys.executable, "-c", "raise SystemExit('boom')"])
