"""Helpers of the tests of environments: odd actions, and a fresh process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

ODD_TEXTS = ["", " ", "\n", "\t\r", "\x00", "a" * 5000, "é", "漢字", "🙂", "\ud800", "İ"]
ODD_TEXTS += ["[SEP]", "<|im_end|>", "%s{}", "[", "]", "[]", "[[", "]]", "buy[x]", "use", "help", "examine"]
ODD_TEXTS += ["open \\", "go to", "go to ", "go to nowhere 1", "take", "take  from ", "move to"]
ODD_TEXTS += ["search", "search[", "search[]", "search[ ]", "search]x[", "search[<r>]", "search[<a>]"]
ODD_TEXTS += ["search[a\nb]", "search[\x00]", "search[🙂 é]", "search[" + "a b " * 900 + "]"]
ODD_TEXTS += ["click", "click[]", "click[a]b]", "click[search]", "click[buy now]]", "CLICK[BUY NOW]"]
ODD_TEXTS += ["click[page 1]"]


def run_in_new_process(code: str) -> str:
    """Run code with another hash seed and another random state, and return what it prints."""
    command = [sys.executable, "-c", f"import random; random.seed(99)\n{code}"]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "check": True}
    return subprocess.run(command, **options).stdout
