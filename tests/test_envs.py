"""Tests of what all environments share: `make_env` and `View`."""

import subprocess
import sys
from pathlib import Path

import pytest

from envs import make_env


def test_an_unknown_name_is_an_error_that_lists_the_environments():
    with pytest.raises(ValueError, match="environment 'alfwrld' is unknown: .* household, alfworld, webshop"):
        make_env("alfwrld")


def test_a_view_is_immutable():
    view = make_env("household").reset("eval", 0)
    with pytest.raises(AttributeError):
        view.outcome = 1.0
    assert (view.outcome, view.success, view.done) == (0.0, False, False)


def test_household_needs_neither_torch_nor_transformers():
    code = (
        "import sys; from envs import make_env; make_env('household').reset('train', 0);"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    root = Path(__file__).parent.parent
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
