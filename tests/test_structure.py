"""The layout of the project, read from its source: files in reading order, each using only those above it."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = [
    *[
        "losses",
        "buffer",
        "distributed",
        "household",
        "webshop_search",
        "webshop",
        "alfworld_translation",
        "alfworld_engine",
    ],
    *["alfworld_player", "webshop_player"],
    *["envs", "sampler", "policy"],
    *["reward_model", "pool", "rollout", "rspo", "checkpoint", "plan", "report", "flags", "train"],
    *["bench_goals", "bench_environments", "bench_trl", "bench_core", "bench", "gpu_check"],
]
FILES = [name for name in ORDER if (ROOT / f"{name}.py").exists()]
METHOD = [name for name in FILES if ORDER.index(name) <= ORDER.index("rspo")]  # the others are the run's
HEAVY = {
    "transformers",
    "peft",
    "matplotlib",
    "vllm",
    "alfworld",
    "textworld",
    "wandb",
    "tensorboard",
    "tyro",
}


def tree(name):
    return ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))


def imported(nodes):
    """The first part of each imported module's name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield node.module.split(".")[0]


def at_import(node):
    """The nodes that run when the module is imported: all but the insides of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from at_import(child)


def texts(name):
    """The string literals, docstrings and other bare strings left out."""
    nodes = list(ast.walk(tree(name)))
    bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    literals = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in bare)
    return [node.value for node in literals if isinstance(node.value, str)]


def test_every_file_has_its_place_in_the_order():
    assert {path.stem for path in ROOT.glob("*.py")} <= set(ORDER)


@pytest.mark.parametrize("name", FILES)
def test_a_file_uses_only_those_above_it(name):
    own = set(imported(ast.walk(tree(name)))) & set(ORDER)
    assert own <= set(ORDER[: ORDER.index(name)])


@pytest.mark.parametrize("name", METHOD)
def test_heavy_libraries_are_imported_by_the_function_that_needs_them(name):
    assert not set(imported(at_import(tree(name)))) & HEAVY


def test_losses_take_torch_alone():
    assert set(imported(ast.walk(tree("losses")))) - sys.stdlib_module_names == {"torch"}


@pytest.mark.parametrize("name", METHOD)
def test_flags_belong_to_the_run(name):
    assert "tyro" not in imported(ast.walk(tree(name)))


@pytest.mark.parametrize("name", METHOD)
def test_the_method_names_no_device(name):
    assert not [text for text in texts(name) if "cuda" in text]


def test_there_are_no_packages():
    assert not list(ROOT.glob("*/__init__.py"))
