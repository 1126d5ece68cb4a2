"""The identity of a run: what must be unchanged when it is resumed or evaluated.

A checkpoint holds trained weights and counters. The rest of what a run computes with lies in other files. The
checkpoint's state therefore also holds fingerprints of the starting model, its tokenizer, its chat template
and the step reward model, and the value of every flag.

Fingerprints are taken of what was loaded, not of files: a hub cache or a folder may move, and a file may be
written again with the same content. Of each tensor they hold name, type, shape, the sum of its 64-bit words
modulo 2^64, and the bits of 4,096 elements. The sum is exact on every device and with any number of threads,
so every changed weight counts; the elements show a change of order. A 7B model in bf16 takes a second on a
CPU core, and less on a GPU.

Left out: protection against a model that is made to have the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from flags import Args, UsageError
from record.checkpoint import Checkpoint
from scale import distributed

ELEMENTS = 4096  # per tensor, at equal distances
VOLATILE = ("dtype", "torch_dtype", "transformers_version")  # keys that change with the package
PROBE = """It's 7 o'clock: "I'm at desk 1",\tshe said — naïve façade, £50.00, 12,345 km², [Search].
    def f(x): return x ** 2  # Größe, 東京, Привет, 🙂; don't  stop\r\n<action>go to cabinet 12</action>"""


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def of_tensors(tensors: Mapping[str, object]) -> str:
    """Return a fingerprint of named tensors. It does not depend on their order or device."""
    import torch

    facts = []
    for name in sorted(tensors):
        flat = tensors[name].detach().contiguous().flatten()
        per_word = 8 // flat.element_size()
        if flat.storage_offset() % per_word:
            flat = flat.clone()  # a view as 64-bit words must begin with a word
        whole = len(flat) // per_word * per_word
        words, rest = flat[:whole].view(torch.int64), flat[whole:]
        few = torch.cat([flat[:: max(1, len(flat) // ELEMENTS)], rest]).cpu().view(torch.uint8)
        digest = hashlib.sha256(few.numpy().tobytes()).hexdigest()
        facts.append([name, str(flat.dtype), list(tensors[name].shape), int(words.sum()), digest])
    return _digest(facts)


def of_tokenizer(tokenizer) -> str:
    """Return a fingerprint of the tokens, their ids, the merges, and the encoding of a probe text.

    It does not contain the tokenizer's settings as such: they change with the version of the package.
    """
    merges = []
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        for merge in json.loads(backend.to_str())["model"].get("merges") or []:
            merges.append(merge if isinstance(merge, str) else " ".join(merge))
    added = {str(id): token.content for id, token in tokenizer.added_tokens_decoder.items()}
    special = [tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.all_special_ids]
    probe = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    return _digest([tokenizer.get_vocab(), merges, added, special, probe])


def of_base(base) -> dict:
    """Return the fingerprints of a `model.Base` that has no adapters yet, and its config, by part."""
    config = json.loads(json.dumps(base.model.config.to_dict(), default=str))
    return {
        "model weights": of_tensors(base.model.state_dict()),
        "model config": {k: v for k, v in config.items() if k not in VOLATILE and not k.startswith("_")},
        "tokenizer": of_tokenizer(base.chat.tokenizer),
        "chat template": _digest(base.chat.tokenizer.chat_template),
        "stop tokens": list(base.chat.stop_ids),
    }


def of_evaluated(parts: dict, saved: Checkpoint | None) -> dict:
    """Return the fingerprints of an evaluated policy: `parts` of its base, and its checkpoint if any."""
    if saved is None:
        return parts
    return parts | {"checkpoint": of_tensors(saved.tensors["policy"])}


def of_reward_model(model) -> dict:
    """Return the fingerprint of a fitted step reward model and of its tokenizer, by part."""
    weights, tokenizer = of_tensors(model.state_dict()), of_tokenizer(model.chat.tokenizer)
    return {"step reward model": _digest([weights, tokenizer])}


def changed_parts(saved: dict, found: dict) -> list[str]:
    """Return the names of the parts that differ. A part that only one side has is not compared.

    Of a model config, only keys that both sides have are compared, since a new version of a package may add
    some. The changed keys follow its name: "model config (rope_theta)".
    """
    names = []
    for part in saved:
        if part not in found or saved[part] == found[part]:
            continue
        if part != "model config":
            names.append(part)
            continue
        both = [key for key in saved[part] if key in found[part]]
        if keys := [key for key in both if saved[part][key] != found[part][key]]:
            names.append(f"{part} ({', '.join(keys[:4])})")
    return names


def check(args: Args, saved: Checkpoint | None, parts: dict) -> None:
    """Raise UsageError if fingerprints of loaded models differ from the checkpoint's, or between ranks."""
    if saved and (changed := changed_parts(saved.state.get("identity", {}), parts)):
        flag, why = f"--out {args.out}", "in the run folder changed since the run was trained"
        if "step reward model" in changed and args.reward_model:
            flag, why = f"--reward_model {args.reward_model}", "there changed since the run was trained"
        elif not Path(args.out, "start").is_dir():
            flag, why = f"--model {args.model}", "there changed since the run was trained"
        raise UsageError(
            f"{flag}: the {' and '.join(changed)} {why}; put the old files back, or start a new run"
        )
    for number, found in enumerate(distributed.gather([parts])):
        if changed := changed_parts(parts, found):
            why = f"differs between ranks {distributed.rank()} and {number}; give all ranks the same files"
            raise UsageError(f"--model {args.model}: the {' and '.join(changed)} {why}")
