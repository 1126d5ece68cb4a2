"""Folders that `load_base` and the step reward model load exactly, and damaged ones that they refuse."""

import dataclasses
import json
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device import DEVICE
from tiny import BATCH, needs_models, tiny

from flags import Args, UsageError
from model import load_base
from record.artifacts import load_start, named_reward_model
from record.reward_model_files import load_reward_model, save_reward_model
from reward_model import StepRewardModel

pytestmark = needs_models
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 538090408\n"
FIRST = "model.layers.0."
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


# --- making folders


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a folder with a model `base/`, whose output layer is its embedding, and its `adapter/`."""
    folder = tmp_path_factory.mktemp("sources")
    tiny().save(folder / "base")
    save_adapter(folder / "base", folder / "adapter", LORA)
    return folder


def load_lm(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def save_adapter(base, folder, settings, std=0.1):
    """Save an adapter of the model in `base` with random weights. Returns peft's model."""
    import peft

    kind = peft.PromptTuningConfig if "num_virtual_tokens" in settings else peft.LoraConfig
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of the adapters that it cannot merge
        tuned = peft.get_peft_model(load_lm(base), kind(**settings)).eval()
        for p in tuned.parameters():
            if p.requires_grad:
                p += std * torch.randn(p.shape, generator=generator)
        tuned.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(base / file, folder / file)
    return tuned


def edit_weights(folder, change, file=WEIGHTS):
    """Replace the weights by change(weights)."""
    from safetensors.torch import load_file, save_file

    weights = {key: value.clone() for key, value in change(load_file(folder / file)).items()}
    save_file(weights, folder / file, metadata={"format": "pt"})


def edit_json(folder, file, **changes):
    """Set entries of a JSON file, or remove those that are None."""
    content = json.loads((folder / file).read_text()) | changes
    content = {key: value for key, value in content.items() if value is not None}
    (folder / file).write_text(json.dumps(content))


def edit_tokenizer(folder, words=(), **special):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(list(words))
    tokenizer.add_special_tokens(special)
    tokenizer.save_pretrained(folder)


def truncate(folder, file):
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])


def renamed(old, new):
    return lambda weights: {key.replace(old, new, 1): value for key, value in weights.items()}


def without(part):
    return lambda weights: {key: value for key, value in weights.items() if part not in key}


def with_more(**more):
    return lambda weights: weights | {key.replace("__", "."): value for key, value in more.items()}


def logits(model):
    with torch.no_grad():
        return model(BATCH.input_ids.cpu()).logits


# --- model folders that are refused


def add_prefix(folder):
    edit_weights(folder, lambda weights: {f"_orig_mod.{key}": value for key, value in weights.items()})


def lose_a_layer(folder):
    edit_weights(folder, without(".layers.1."))


def to_type(dtype):
    """Return a change that turns the matrices into another type."""

    def change(folder):
        edit_weights(
            folder, lambda found: {k: v.mul(100).to(dtype) if v.ndim == 2 else v for k, v in found.items()}
        )

    return change


def add_a_layer(folder):
    edit_weights(folder, lambda weights: weights | renamed(".layers.1.", ".layers.2.")(weights))


def cut_the_embedding(folder):
    def cut(weights):
        return {key: value[:9] if "embed" in key else value for key, value in weights.items()}

    edit_weights(folder, cut)


def lose_a_shard(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    place = {key: f"model-{1 + (i > 9)}.safetensors" for i, key in enumerate(weights)}
    first = {key: value for key, value in weights.items() if place[key] == "model-1.safetensors"}
    save_file(first, folder / "model-1.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))


def pickle_the_weights(folder, content=b"no pickle"):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(content)


def ask_for_remote_code(folder):
    classes = {"AutoConfig": "new.NewConfig", "AutoModelForCausalLM": "new.NewModel"}
    edit_json(folder, "config.json", model_type="new_model", auto_map=classes)
    (folder / "new.py").write_text("raise SystemExit('this code was run')")


def another_architecture(name, auto_class):
    """Return a function that replaces the model by a tiny one of another architecture."""

    def change(folder):
        import transformers

        for file in ("generation_config.json", WEIGHTS):
            (folder / file).unlink()
        config = transformers.CONFIG_MAPPING[name](
            vocab_size=30,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.5,
        )
        torch.manual_seed(0)
        getattr(transformers, auto_class).from_config(config).save_pretrained(folder)

    return change


def make_a_run(folder):
    (folder / "run.json").write_text("{}")


REFUSED = {  # what is done to the folder: a pattern of the message after "--model FOLDER: "
    "a prefix of torch.compile": (add_prefix, r"27 missing, 26 unexpected.*_orig_mod\.model"),
    "8-bit integers": (to_type(torch.int8), r"15 weights of .* have type I8, such as .*quantized or damaged"),
    "truth values": (
        to_type(torch.bool),
        r"have type BOOL, such as .*give the model that they were made from",
    ),
    "a layer is missing": (lose_a_layer, r"12 missing; such as model\.layers\.1\.input_layernorm\.weight"),
    "a layer too many": (add_a_layer, r"12 unexpected; such as model\.layers\.2"),
    "an embedding too small": (cut_the_embedding, r"1 of another shape; such as model\.embed_tokens"),
    "a head too many": (
        lambda folder: edit_weights(folder, with_more(v_head__weight=torch.ones(1))),
        r"1 unexpected; such as v_head\.weight",
    ),
    "truncated weights": (lambda folder: truncate(folder, WEIGHTS), r"model\.safetensors is damaged"),
    "a git-lfs pointer as weights": (
        lambda folder: (folder / WEIGHTS).write_text(POINTER),
        r"model\.safetensors is a git-lfs pointer; run git lfs pull in its repository",
    ),
    "a git-lfs pointer as tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text(POINTER),
        r"tokenizer\.json is a git-lfs pointer; run git lfs pull in its repository",
    ),
    "broken config.json": (lambda folder: truncate(folder, "config.json"), r"config\.json is damaged"),
    "broken generation_config.json": (
        lambda folder: truncate(folder, "generation_config.json"),
        r"generation_config\.json is damaged",
    ),
    "broken tokenizer.json": (
        lambda folder: truncate(folder, "tokenizer.json"),
        r"tokenizer\.json is damaged",
    ),
    "broken tokenizer_config.json": (
        lambda folder: truncate(folder, "tokenizer_config.json"),
        r"tokenizer_config\.json is damaged",
    ),
    "an empty tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        r"cannot load the tokenizer of .*KeyError",
    ),
    "a missing shard": (lose_a_shard, r"lacks 1 of 2 weight files: model-2\.safetensors"),
    "a broken pickle": (pickle_the_weights, r"cannot load .*Unpickling"),
    "bitsandbytes": (
        lambda folder: edit_json(
            folder, "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
        ),
        "are quantized; give the model that they were made from",
    ),
    "AWQ": (
        lambda folder: edit_json(folder, "config.json", quantization_config={"quant_method": "awq"}),
        "are quantized",
    ),
    "remote code": (ask_for_remote_code, "contains custom code"),
    "an unknown architecture": (
        lambda folder: edit_json(folder, "config.json", model_type="new_model"),
        "model type `new_model`",
    ),
    "no architecture": (lambda folder: (folder / "config.json").write_text("{}"), "Unrecognized model"),
    "an encoder": (another_architecture("bert", "AutoModelForMaskedLM"), "'bert' is no causal LM"),
    "an encoder and a decoder": (
        another_architecture("bart", "AutoModelForSeq2SeqLM"),
        r"cannot load .* missing, \d+ unexpected",
    ),
    "a template with a syntax error": (
        lambda folder: (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m }"),
        "chat template cannot be rendered .unexpected",
    ),
    "a template that refuses users": (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ raise_exception('nobody') }}"),
        "chat template cannot be rendered .nobody",
    ),
    "words without an embedding": (
        lambda folder: edit_tokenizer(folder, words=["lamp", "chair"]),
        r"ids up to 21 \(chair\), but the embedding of the model has 20 rows",
    ),
    "an end token without an embedding": (
        lambda folder: edit_tokenizer(folder, eos_token="[EOS]"),
        r"ids up to 20 \(\[EOS\]\)",
    ),
    "a stop id without an embedding": (
        lambda folder: edit_json(folder, "generation_config.json", eos_token_id=[4, 99]),
        "ids up to 99",
    ),
    "a run": (make_a_run, "it is a run or a part of one.* give .*/model/policy, its policy"),
    "a step reward model": (
        lambda folder: (folder / "reward_model.json").write_text("{}"),
        "it is a run or a part of one.* give .*/policy, its policy",
    ),
}


def message_of(folder, dtype="float32"):
    """Return the message of `load_base` after "--model FOLDER: ", which is one line."""
    with pytest.raises(ValueError) as caught:
        load_base(str(folder), dtype=dtype)
    message, prefix = str(caught.value), f"--model {folder}: "
    assert message.startswith(prefix) and "\n" not in message
    return message.removeprefix(prefix)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_folder_that_cannot_be_loaded_exactly_is_refused(name, sources, tmp_path, monkeypatch):
    def ask(*_):
        raise AssertionError("a question on stdin")

    monkeypatch.setattr("builtins.input", ask)
    change, pattern = REFUSED[name]
    folder = Path(shutil.copytree(sources / "base", tmp_path / "model"))
    change(folder)
    assert re.search(pattern, message_of(folder))


@pytest.mark.slow
def test_a_vision_model_is_refused(sources, tmp_path):
    folder = Path(shutil.copytree(sources / "base", tmp_path / "model"))
    another_architecture("vit", "AutoModelForImageClassification")(folder)
    assert "Unrecognized configuration class" in message_of(folder)


# --- adapters that are refused


def change_config(**changes):
    return lambda folder: edit_json(folder, "adapter_config.json", **changes)


def change_weights(change):
    return lambda folder: edit_weights(folder, change, ADAPTER)


REFUSED_ADAPTERS = {  # what is done to the folder: a pattern of the message
    "no base": (
        change_config(base_model_name_or_path=None),
        "names no base model; set base_model",
    ),
    "an empty base": (change_config(base_model_name_or_path=""), "names no base model"),
    "a base that is gone": (
        change_config(base_model_name_or_path="/nowhere/base"),
        r"its base /nowhere/base is not there; correct base_model_name_or_path in .*adapter_config\.json",
    ),
    "a base that is an adapter": (
        lambda folder: edit_json(folder, "adapter_config.json", base_model_name_or_path=str(folder)),
        "is an adapter too",
    ),
    "keys of another base class": (
        change_weights(renamed("model.model.layers", "model.layers")),
        "cannot load the adapter .*28 missing, 28 unexpected",
    ),
    "5 of 28 tensors": (change_weights(lambda weights: dict(list(weights.items())[:5])), "23 missing"),
    "another rank": (change_config(r=8), "28 of another shape"),
    "the embedding of another vocabulary": (
        change_weights(with_more(base_model__model__model__embed_tokens__weight=torch.ones(24, 16))),
        "1 of another shape.*embed_tokens",
    ),
    "weights that are not numbers": (
        change_weights(lambda weights: {key: value * torch.nan for key, value in weights.items()}),
        "its weights are not numbers",
    ),
    "an unknown kind": (change_config(peft_type="NEWLORA"), "cannot load the adapter .*NEWLORA"),
    "unknown modules": (change_config(target_modules=["w_pack"]), "w_pack.*not found in the base model"),
    "no weights": (lambda folder: (folder / ADAPTER).unlink(), "has no adapter_model.safetensors"),
    "truncated weights": (lambda folder: truncate(folder, ADAPTER), r"adapter_model\.safetensors is damaged"),
    "broken adapter_config.json": (
        lambda folder: truncate(folder, "adapter_config.json"),
        r"adapter_config\.json is damaged",
    ),
}


@pytest.mark.parametrize("name", REFUSED_ADAPTERS)
def test_an_adapter_that_cannot_be_loaded_exactly_is_refused(name, sources, tmp_path):
    change, pattern = REFUSED_ADAPTERS[name]
    folder = Path(shutil.copytree(sources / "adapter", tmp_path / "adapter"))
    change(folder)
    assert re.search(pattern, message_of(folder))


@pytest.mark.parametrize("with_config", [False, True])
def test_an_adapter_on_a_hub_is_refused_because_it_would_stay_unmerged(
    with_config, sources, tmp_path, monkeypatch
):
    """transformers would load the base and add the adapter to it. A cache of the hub stands in for it."""
    repository = tmp_path / "models--some-org--adapter"
    folder = Path(shutil.copytree(sources / "adapter", repository / "snapshots" / "0"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    if with_config:
        shutil.copy(sources / "base" / "config.json", folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError) as caught:
        load_base("some-org/adapter")
    why = "some-org/adapter is an adapter on a hub; download it and give its folder"
    assert str(caught.value) == f"--model some-org/adapter: {why}"


ONE_MATRIX = {"r": 4, "target_modules": ["q_proj"]}
UNMERGEABLE = {
    # The output layer is the embedding. The adapter changes one of them, its merge both.
    "a tied embedding": ({"r": 4, "target_modules": ["embed_tokens"]}, "log-probs change by"),
    "a tied output layer": ({"r": 4, "target_modules": ["lm_head"]}, "log-probs change by"),
    "biases of the adapter": (LORA | {"lora_bias": True}, "lora_bias=True"),
    "an adapter that a token activates": (ONE_MATRIX | {"alora_invocation_tokens": [5]}, "aLoRA"),
    "a prompt": ({"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}, "1 unexpected"),
}


@pytest.mark.parametrize("name", UNMERGEABLE)
def test_an_adapter_that_cannot_be_merged_truly_is_refused(name, sources, tmp_path):
    settings, reason = UNMERGEABLE[name]
    save_adapter(sources / "base", tmp_path / "adapter", settings)
    assert reason in message_of(tmp_path / "adapter")


@pytest.mark.parametrize("part", ["lm_head", "bias"])
def test_an_adapter_without_the_weights_that_it_trained_beside_its_matrices_is_refused(
    part, sources, tmp_path
):
    extra = {"modules_to_save": ["lm_head"]} if part == "lm_head" else {"bias": "all"}
    save_adapter(sources / "base", tmp_path / "adapter", ONE_MATRIX | extra)
    edit_weights(tmp_path / "adapter", without(part), ADAPTER)
    assert f"{part}" in message_of(tmp_path / "adapter")


def test_an_adapter_that_bf16_would_round_away_is_refused(sources, tmp_path):
    # a weight of 0.2 has neighbours 0.001 apart in bf16; the adapter moves it by 4e-5
    save_adapter(sources / "base", tmp_path / "adapter", LORA, std=1e-4)
    message = message_of(tmp_path / "adapter", dtype="bfloat16")
    assert "is lost in bfloat16: it changes log-probs by" in message and "--dtype float32" in message
    load_base(str(tmp_path / "adapter"))


# --- folders that are loaded exactly


@pytest.mark.parametrize(
    "settings",
    [
        ONE_MATRIX | {"modules_to_save": ["lm_head"]},  # no longer the embedding
        pytest.param(LORA, marks=pytest.mark.slow),
        pytest.param(LORA | {"use_dora": True}, marks=pytest.mark.slow),
        pytest.param(ONE_MATRIX | {"trainable_token_indices": [5, 6]}, marks=pytest.mark.slow),
    ],
    ids=["own output layer", "LoRA", "DoRA", "two tokens"],
)
def test_a_merged_adapter_and_its_saved_copy_equal_the_adapter(settings, sources, tmp_path):
    expected = logits(save_adapter(sources / "base", tmp_path / "adapter", settings))
    assert (expected - logits(load_lm(sources / "base"))).abs().max() > 0.5
    base = load_base(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(base.model), expected, atol=1e-4, rtol=1e-4)
    base.save(tmp_path / "start")
    assert torch.equal(logits(load_base(str(tmp_path / "start")).model), logits(base.model))


def test_an_adapter_is_merged_in_fp32_whatever_the_dtype(sources, tmp_path):
    import peft

    save_adapter(sources / "base", tmp_path / "adapter", LORA)
    rounded = load_lm(sources / "base").bfloat16().float()
    exact = peft.PeftModel.from_pretrained(rounded, tmp_path / "adapter").merge_and_unload()
    merged = load_base(str(tmp_path / "adapter"), dtype="bfloat16").model
    assert merged.dtype == torch.bfloat16
    for (name, ours), (_, theirs) in zip(merged.named_parameters(), exact.named_parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16()), name


def test_an_adapter_without_effect_is_merged_in_bf16(sources, tmp_path):
    save_adapter(sources / "base", tmp_path / "adapter", LORA, std=0)
    assert load_base(str(tmp_path / "adapter"), dtype="bfloat16").changed


def test_a_base_may_be_named_relative_to_its_adapter(sources, tmp_path, monkeypatch):
    moved = Path(shutil.copytree(sources, tmp_path / "moved"))
    edit_json(moved / "adapter", "adapter_config.json", base_model_name_or_path="../base")
    monkeypatch.chdir(tmp_path)
    assert load_base(str(moved / "adapter")).changed


def test_a_pad_token_without_an_embedding_is_replaced(sources, tmp_path):
    folder = Path(shutil.copytree(sources / "base", tmp_path / "model"))
    edit_tokenizer(folder, pad_token="[PAD]")
    chat = load_base(str(folder)).chat
    assert chat.tokenizer.pad_token_id == 20 and chat.pad_id == chat.end_id < 20


def test_a_special_token_that_nothing_uses_needs_no_embedding(sources, tmp_path):
    folder = Path(shutil.copytree(sources / "base", tmp_path / "model"))
    edit_tokenizer(folder, additional_special_tokens=["<image>"])
    load_base(str(folder))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace("<user>", "<image>"))
    assert "ids up to 20 (<image>)" in message_of(folder)


def test_pickled_weights_are_loaded_without_running_code(sources, tmp_path):
    from safetensors.torch import load_file

    folder = Path(shutil.copytree(sources / "base", tmp_path / "model"))
    weights = load_file(folder / WEIGHTS)
    pickle_the_weights(folder)
    torch.save(weights, folder / "pytorch_model.bin")
    assert torch.equal(logits(load_base(str(folder)).model), logits(load_lm(sources / "base")))


COMMON = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 4,
    "pad_token_id": 0,
}
ARCHITECTURES = {  # model type: sizes beside the common ones, and a prefix that old files may lack
    "qwen2": ({"tie_word_embeddings": True}, "model."),
    "llama": ({}, None),
    "gpt2": ({"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}, "transformer."),
    "gemma": ({"head_dim": 8}, "model."),
    "mistral": ({}, None),
    "opt": ({"ffn_dim": 32, "word_embed_proj_dim": 16}, "model."),
    "phi": ({"num_key_value_heads": 2}, None),
    "phi3": ({}, None),
    "qwen3": ({"head_dim": 8}, None),
    "gpt_neox": ({}, None),
    "gpt_neo": ({"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}, None),
    "falcon": ({}, None),
    "bloom": ({"n_layer": 2, "n_head": 2}, "transformer."),
    "stablelm": ({}, None),
    "olmo2": ({}, None),
    "mixtral": ({"num_local_experts": 2}, None),
}
QUICK = ("qwen2", "llama", "gpt2")


ROWS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ARCHITECTURES]


@pytest.mark.parametrize("name", ROWS)
def test_weights_of_an_architecture_fit_also_in_old_files(name, sources, tmp_path):
    """Tied output layers may be saved or not. Old files hold buffers and lack the prefix of the decoder."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes, prefix = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**COMMON | sizes)).eval()
    folder = Path(shutil.copytree(sources / "base", tmp_path / "model"))
    model.save_pretrained(folder)
    expected = logits(model)
    assert torch.equal(logits(load_base(str(folder)).model), expected)

    old = {}
    if name in ("llama", "mistral", "phi"):
        old["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    if name == "gpt2":
        old |= {"transformer.h.0.attn.bias": torch.ones(4), "transformer.h.0.attn.masked_bias": torch.ones(1)}
    if name == "gpt_neo":
        old["transformer.h.0.attn.attention.bias"] = torch.ones(4)
    if name == "gpt_neox":
        old["gpt_neox.layers.0.attention.masked_bias"] = torch.ones(1)
    if model.config.tie_word_embeddings:
        old["lm_head.weight"] = model.get_input_embeddings().weight.data
    edit_weights(folder, lambda weights: weights | old)
    if prefix:
        edit_weights(folder, lambda weights: {key.removeprefix(prefix): w for key, w in weights.items()})
    assert torch.equal(logits(load_base(str(folder)).model), expected)


# --- other folders


def test_a_damaged_start_of_a_run_is_named_by_the_run(sources, tmp_path):
    shutil.copytree(sources / "base", tmp_path / "start")
    truncate(tmp_path / "start", WEIGHTS)
    args = SimpleNamespace(dtype="float32", device="cpu", gradient_checkpointing=False, autocast=None)
    with pytest.raises(UsageError, match=f"^--out {tmp_path}: .*start/model.safetensors is damaged"):
        load_start(args, tmp_path)


@pytest.mark.parametrize("gap", ["its tokenizer joins texts", ""])
def test_a_tokenizer_that_joins_texts_with_its_template_brings_a_warning(
    gap, sources, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("record.artifacts.rendering_gap", lambda chat: gap)
    folder = str(sources / "base")
    args = Args(model=folder, dtype="float32", device="cpu", autocast=False)
    base = load_start(args, None)
    args = dataclasses.replace(args, reward_model_backbone=folder)
    named_reward_model(args, base)
    lines = [f"warning: --{flag} {folder}: {gap}" for flag in ("model", "reward_model_backbone")]
    assert capsys.readouterr().out.splitlines() == (lines if gap else [])


@pytest.mark.parametrize(
    "change, reason",
    [
        (without("head.0.weight"), r"1 missing; such as head\.0\.weight"),
        (with_more(more=torch.ones(1)), "1 unexpected; such as more"),
        (
            lambda weights: weights | {"head.2.bias": torch.ones(4)},
            r"1 of another shape; such as head\.2\.bias",
        ),
    ],
)
def test_a_step_reward_model_with_other_weights_is_refused(change, reason, tmp_path):
    base = tiny()
    save_reward_model(StepRewardModel.from_base(base), tmp_path)
    edit_weights(tmp_path, change)
    with pytest.raises(ValueError, match=f"the step reward model in {tmp_path} is damaged .*{reason}"):
        load_reward_model(tmp_path, base.chat, device=DEVICE)
