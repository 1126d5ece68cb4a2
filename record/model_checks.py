"""The checks of a model that need no torch: its folder, its tokenizer, the names and shapes of its weights.

record/checks.py calls these functions before anything is loaded, model.py while it loads a model.

A folder may be incomplete, damaged, or no model at all. A library that loads it may then raise any error, or
load something else in silence. Every refusal is a ValueError of one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from chat import REPLY, Chat, render

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
FLOATS = (
    "F64",
    "F32",
    "F16",
    "BF16",
)  # the types of weights that are not quantized, as safetensors names them
POINTER = b"version https://git-lfs"  # the first bytes of a file that git-lfs has not fetched


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


def check_regular(*folders: Path) -> None:
    """Raise ValueError if a folder contains a FIFO or a device: opening one may wait for ever."""
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.exists() and not path.is_file() and not path.is_dir():
                raise ValueError(f"{path} is not a regular file; {COPY}")


def check_fetched(file: Path) -> None:
    """Raise ValueError if a file is a git-lfs pointer, which holds only the address of its content."""
    with file.open("rb") as stream:
        if stream.read(len(POINTER)) == POINTER:
            raise ValueError(f"{file} is a git-lfs pointer; run git lfs pull in its repository")


def read_json(file: Path) -> dict:
    """Return the JSON object in a file of a model. Raises ValueError that names the file."""
    with explained(f"{file} is damaged", COPY):
        content = file.read_bytes()
    check_fetched(file)
    with explained(f"{file} is damaged", COPY):
        found = json.loads(content)
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
    return found


def base_of_adapter(folder: Path) -> str:
    """Return the folder or the hub id of the model that an adapter was trained on.

    If the run folder was moved, the base of its policy/ is the start/ beside it. Raises ValueError if the
    base is not named, is not there, or is an adapter too.
    """
    file = folder / "adapter_config.json"
    base = read_json(file).get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ValueError(f"{file} names no base model; set base_model_name_or_path in it")
    if (folder / base).is_dir():  # relative to the adapter
        base = str((folder / base).resolve())
    own_start = folder.parent / "start"
    if base.startswith("/") and not Path(base).is_dir() and own_start.is_dir():  # the run folder was moved
        base = str(own_start.resolve())
    if base.startswith(("/", ".", "~")) and not Path(base).is_dir():
        raise ValueError(f"its base {base} is not there; correct base_model_name_or_path in {file}")
    if (Path(base) / "adapter_config.json").is_file():
        raise ValueError(f"its base {base} is an adapter too; merge that into its own base first")
    return base


def check_folder(folder: Path) -> None:
    """Raise ValueError if the folder is part of a run, or if a file is damaged. A hub id is not checked."""
    from safetensors import safe_open

    inside_run = {"run.json": ".", "reward_model.json": "..", "policy.safetensors": "../.."}
    for file, up in inside_run.items():  # a run, its reward_model/, one of its checkpoints
        if (folder / file).exists():
            policy = (folder / up / "policy").resolve()
            raise ValueError(f"it is a run or a part of one, but no model; give {policy}, its policy")
    if folder.is_dir():
        check_regular(folder)
    for name in JSON_FILES:
        if (folder / name).is_file():
            read_json(folder / name)
    if (folder / "adapter_config.json").is_file() and not any(folder.glob("adapter_model.*")):
        raise ValueError(f"{folder} has no adapter_model.safetensors; {COPY}")
    for file in weight_files(folder):
        check_fetched(file)
        if file.suffix == ".safetensors":
            # opening reads the header and compares it with the size of the file
            with explained(f"{file} is damaged", COPY), safe_open(file, "np") as weights:
                names = weights.keys()
                types = {key: weights.get_slice(key).get_dtype() for key in names}
            check_types(file, types)


def check_types(file: Path, types: dict[str, str]) -> None:
    """Raise ValueError if a weight is not of a floating-point type. Buffers, such as masks, may have any."""
    odd = [key for key, kind in sorted(types.items()) if key.endswith("weight") and kind not in FLOATS]
    if odd:
        what = f"{len(odd)} weights of {file} have type {types[odd[0]]}, such as {odd[0]}"
        raise ValueError(f"{what}: they are quantized or damaged; give the model that they were made from")


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
    found = read_json(index)
    with explained(f"{index} is damaged", COPY):
        shards = sorted(set(found["weight_map"].values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise ValueError(f"{folder} lacks {len(absent)} of {len(shards)} weight files: {absent[0]}; {COPY}")
    return [folder / shard for shard in shards]


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


def rendering_gap(chat: Chat) -> str:
    """Say how prompts differ from the tokenizer's ids of the rendered chat. Return "" if they are equal.

    `Chat` encodes each text separately from the template. Some tokenizers join a text with the words of the
    template beside it, or put a space before every text. Sampling and training both read the ids of `Chat`,
    so they agree. The ids of a sampled reply are never compared: they stay as sampled.
    """
    first, later = "Your task is to: find mug 1.", "You see desk 2. Write <action>look</action>"
    after_reply = render(chat.tokenizer, [("user", first), ("assistant", REPLY), ("user", later)])
    prompts = [
        (chat.first(first), render(chat.tokenizer, [("user", first)])),
        (chat.extend([], later), after_reply.rpartition(REPLY)[2]),
    ]
    for ours, text in prompts:
        theirs = chat.tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
        if ours != theirs:
            same = len(os.path.commonprefix([ours, theirs]))
            shown = [chat.tokenizer.convert_ids_to_tokens(ids[same : same + 3]) for ids in (ours, theirs)]
            return (
                "its tokenizer joins texts with its chat template. Prompts are encoded separately from the "
                f"template: they have {shown[0]} in place of {shown[1]}, so the model may act a little worse "
                "at first"
            )
    return ""
