"""Where a result was made."""

import subprocess

import torch

from bayeslora.runs.environment import describe_environment


def commit():
    return describe_environment(torch.device("cpu"))["commit"]


def test_the_commit_is_that_of_the_source_or_the_one_that_was_named(monkeypatch):
    monkeypatch.delenv("BAYESLORA_COMMIT", raising=False)
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    assert commit() is None if found.returncode else commit().removesuffix("+changes") == found.stdout.strip()
    monkeypatch.setenv("BAYESLORA_COMMIT", "0123abcd")
    assert commit() == "0123abcd"
