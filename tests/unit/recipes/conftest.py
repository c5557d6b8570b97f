"""Fixtures for the tests of tasks, models and data."""

import json
import socket
import threading

import pytest


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fail if a test waits for another machine: models and data of these tests are on this one.

    TRL reports its use to the hub in a thread, for which nothing waits.
    """
    hosts = []
    look_up = socket.getaddrinfo

    def noted(host, *arguments, **keywords):
        is_here = host in {None, "localhost", "127.0.0.1"}
        if not is_here and threading.current_thread() is threading.main_thread():
            hosts.append(host)
        return look_up(host, *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    yield
    assert hosts == []


@pytest.fixture
def json_lines(tmp_path, monkeypatch):
    """Return a function that writes rows to a file and returns the section ``data`` for it."""
    monkeypatch.chdir(tmp_path)

    def write(rows, name="rows.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)) + "\n")
        return {"type": "json_lines", "path": name, "eval_fraction": 0.5}

    return write
