"""The checks of a model that need no torch: its folder, its tokenizer, the names and shapes of its weights.

A folder may be incomplete, damaged, or no model at all, and what loads it may then raise any error, or load
something else in silence. Every refusal is a ValueError of one line.
"""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from chat import Chat

JSON_FILES = (
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
COPY = "copy it again, or give another folder"
POINTER = b"version https://git-lfs"  # begins a file that git-lfs has not fetched


# --- messages -----------------------------------------------------------------------------------------------


def one_line(error: Exception) -> str:
    """Return the first line of an error's message, and the second one if the first ends with a colon."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].rstrip().endswith(":") else 1])
    if not isinstance(error, OSError | ValueError):
        text = f"{type(error).__name__}: {text}"
    return textwrap.shorten(text, 300, placeholder=" ...")


@contextlib.contextmanager
def explained(what: str, remedy: str):
    """Raise every error as a ValueError of one line. A damaged folder can raise any type of error."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} ({one_line(error)}); {remedy}") from error


def check_keys(what: str, missing: Iterable, unexpected: Iterable, mismatched: Iterable) -> None:
    """Raise ValueError with the count and the first names of weights that do not fit, if there are any."""
    counts, names = [], []
    for kind, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched)):
        keys = sorted(keys)
        if keys:
            counts.append(f"{len(keys)} {kind}")
            names += keys[:2]
    if counts:
        raise ValueError(f"{what} do not fit the model: {', '.join(counts)}; such as {', '.join(names)}")


def check_shapes(what: str, expected: Mapping, found: Mapping) -> None:
    """Raise ValueError unless the tensors found have the expected names and shapes."""
    both = expected.keys() & found.keys()
    mismatched = [key for key in both if expected[key].shape != found[key].shape]
    check_keys(what, expected.keys() - both, found.keys() - both, mismatched)


# --- folders ------------------------------------------------------------------------------------------------


def check_folder(folder: Path) -> None:
    """Raise ValueError if the folder is part of a run, or if a file is damaged. A hub id is not checked."""
    from safetensors import safe_open

    inside_run = {"run.json": ".", "reward_model.json": "..", "policy.safetensors": "../.."}
    for file, up in inside_run.items():  # a run, its reward_model/, one of its checkpoints
        if (folder / file).exists():
            policy = (folder / up / "policy").resolve()
            raise ValueError(f"it is a run or a part of one, but no model; give {policy}, its policy")
    for name in JSON_FILES:
        if (folder / name).is_file():
            with explained(f"{folder / name} is damaged", COPY):
                check_no_pointer(folder / name)
                json.loads((folder / name).read_text(encoding="utf-8"))
    if (folder / "adapter_config.json").is_file() and not any(folder.glob("adapter_model.*")):
        raise ValueError(f"{folder} has no adapter_model.safetensors; {COPY}")
    for file in weight_files(folder):
        with explained(f"{file} is damaged", COPY):
            check_no_pointer(file)
            if file.suffix == ".safetensors":
                with safe_open(file, "np"):  # reads the header and compares it with the size of the file
                    pass


def weight_files(folder: Path) -> list[Path]:
    """Return the files that the folder's weights are loaded from, as transformers and peft choose them."""
    stem = "adapter_model" if (folder / "adapter_config.json").is_file() else "model"
    index = folder / f"{stem}.safetensors.index.json"
    for name in (f"{stem}.safetensors", index.name, f"pytorch_{stem}.bin", f"{stem}.bin"):
        if (folder / name).is_file():
            break
    else:
        return []  # or a format that is not checked
    if name != index.name:
        return [folder / name]
    with explained(f"{index} is damaged", COPY):
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise ValueError(f"{folder} lacks {len(absent)} of {len(shards)} weight files: {absent[0]}; {COPY}")
    return [folder / shard for shard in shards]


def check_no_pointer(file: Path) -> None:
    """Raise ValueError for a file that holds only the address of its content: a clone without Git LFS."""
    with file.open("rb") as stream:
        if stream.read(len(POINTER)) == POINTER:
            raise ValueError(f"its {file.name} is a pointer of Git LFS; run git lfs pull in its repository")


def base_of_adapter(folder: Path) -> str:
    """Return the folder or the hub id of the model that an adapter was trained on."""
    file = folder / "adapter_config.json"
    with explained(f"its {file.name} names no base model", "add base_model_name_or_path to it"):
        start = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
        if not start or not isinstance(start, str):
            raise ValueError("base_model_name_or_path is empty")
    if (folder / start).is_dir():  # relative to the adapter
        start = str((folder / start).resolve())
    own_start = folder.parent / "start"
    if start.startswith("/") and not Path(start).is_dir() and own_start.is_dir():  # the run folder was moved
        start = str(own_start.resolve())
    if start.startswith(("/", ".", "~")) and not Path(start).is_dir():
        raise ValueError(f"its base model {start} is missing; correct its {file.name}")
    if (Path(start) / "adapter_config.json").is_file():
        raise ValueError(f"its base {start} is an adapter too; merge that into its own base first")
    return start


# --- tokenizers ---------------------------------------------------------------------------------------------


def check_tokenizer(chat: Chat, rows: int) -> None:
    """Raise ValueError if a text or the chat format has a token id of `rows` or more.

    A pad id beyond the rows of the embedding is replaced. Any id will do, because padding is never read.
    """
    if chat.pad_id >= rows:
        chat.pad_id = chat.end_id
    special = [i for i, token in chat.tokenizer.added_tokens_decoder.items() if token.special]
    ids = set(chat.tokenizer.get_vocab().values()).difference(special)
    ids.update(chat.stop_ids, chat.first("a", "a"), chat.first("a"), chat.extend([], "a"))
    if max(ids) >= rows:
        name = chat.tokenizer.convert_ids_to_tokens(max(ids))
        raise ValueError(
            f"its tokens have ids up to {max(ids)} ({name}), but the embedding of the model has {rows} rows; "
            "give the model's own tokenizer, or save the model after resize_token_embeddings"
        )
