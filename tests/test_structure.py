"""The layout of the project, read from its source: an order in which each file imports only earlier ones."""

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = [
    "losses",
    "config",
    "buffer",
    "scale.launch",
    "scale.distributed",
    "batch",
    "scale.shared_prompts",
    "rspo",
    "baselines.spear",
    "games.household",
    "games.webshop_search",
    "games.webshop",
    "games.webshop_player",
    "games.alfworld_translation",
    "games.alfworld_engine",
    "games.alfworld_player",
    "games.alfworld_files",
    "envs",
    "dense.scores",
    "dense.novelty",
    "dense.shaped",
    "chat",
    "record.model_checks",
    "model",
    "policy",
    "sampler",
    "scale.vllm_sampler",
    "scale.pool",
    "rollout",
    "record.reward_fit",
    "dense.implicit",
    "reward_model",
    "record.reward_model_files",
    "record.command_line",
    "record.checks",
    "flags",
    "demo.tiny_model",
    "demo.warm_start",
    "scale.plan",
    "record.metrics",
    "record.checkpoint",
    "record.identity",
    "record.log",
    "record.run_folder",
    "record.panels",
    "record.curves",
    "record.transcripts",
    "record.run_logs",
    "record.episodes",
    "record.charts",
    "record.run_charts",
    "record.run_warnings",
    "record.page",
    "record.compare",
    "record.report",
    "record.recorder",
    "record.artifacts",
    "train",
    "demo.toy",
    "demo.walkthrough",
    "bench.goals",
    "bench.environments",
    "bench.trl",
    "bench.core",
    "bench.phases",
    "bench.__main__",
    "bench.gpu_check",
    "reproduce.arms",
    "reproduce.runs",
    "reproduce.reuse",
    "reproduce.tables",
    "reproduce.markdown",
    "reproduce.figure",
    "reproduce.__main__",
]
FOLDERS = ["baselines", "games", "dense", "scale", "demo", "record", "bench", "reproduce"]
METHOD = ["losses", "config", "buffer", "batch", "rspo", "reward_model", "chat", "model", "policy", "sampler"]
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
LIGHT = [
    "config",
    "scale.launch",
    "buffer",
    "envs",
    "dense.scores",
    "dense.novelty",
    "dense.shaped",
    "chat",
    "record.model_checks",
    "record.command_line",
    "record.checks",
    "flags",
    "record.log",
    "record.run_folder",
]  # `--help` and usage errors answer without torch


def path_of(name):
    return ROOT / f"{name.replace('.', '/')}.py"


@functools.cache
def tree(name):
    return ast.parse(path_of(name).read_text(encoding="utf-8"))


def imported(nodes):
    """Yield the dotted name of every imported module, and of every name imported from one."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(nodes):
    return {name.split(".")[0] for name in imported(nodes)}


def at_import(node):
    """Yield the nodes that run when the module is imported: all but the insides of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from at_import(child)


def strings(name):
    """Return the string literals, without docstrings and other bare strings."""
    nodes = list(ast.walk(tree(name)))
    bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    literals = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in bare)
    return [node.value for node in literals if isinstance(node.value, str)]


def lines_of(name):
    return len(path_of(name).read_text().splitlines())


def test_every_file_has_a_place_in_the_order():
    files = {path.stem for path in ROOT.glob("*.py")}
    for folder in FOLDERS:
        files |= {f"{folder}.{path.stem}" for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"}
    assert files == set(ORDER)


def test_a_file_imports_only_earlier_ones():
    for place, name in enumerate(ORDER):
        own = set(imported(ast.walk(tree(name)))) & set(ORDER)
        assert own <= set(ORDER[:place]), name


def test_the_top_level_can_be_read():
    top = [name for name in ORDER if "." not in name]
    assert len(top) <= 14 and all(lines_of(name) <= 450 for name in top)
    assert sum(lines_of(name) for name in ["losses", "buffer", "batch", "reward_model", "rspo"]) <= 1500


def test_a_folder_is_a_package_with_one_line_that_says_what_it_holds():
    for folder in FOLDERS:
        source = (ROOT / folder / "__init__.py").read_text()
        assert ast.get_docstring(ast.parse(source)) and source.count("\n") == 1, folder


def test_heavy_libraries_are_imported_by_the_functions_that_need_them():
    for name in METHOD + LIGHT:
        assert not packages(at_import(tree(name))) & HEAVY, name


def test_flags_need_no_torch():
    for name in LIGHT:
        assert "torch" not in packages(at_import(tree(name))), name


def test_losses_import_torch_only():
    assert packages(ast.walk(tree("losses"))) - sys.stdlib_module_names == {"torch"}


def test_records_and_replay_buffer_import_the_standard_library_only():
    assert packages(ast.walk(tree("buffer"))) <= sys.stdlib_module_names


@pytest.mark.parametrize("name", ["rspo", "batch"])
def test_the_algorithm_imports_neither_models_nor_environments(name):
    own = set(imported(ast.walk(tree(name)))) & set(ORDER)
    assert own <= {"losses", "config", "buffer", "batch", "scale.distributed"}


def test_the_method_names_no_device():
    for name in METHOD + ["rollout", "scale.pool"]:
        assert not [text for text in strings(name) if "cuda" in text], name
