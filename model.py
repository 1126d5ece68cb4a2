"""A causal language model: loading, precision, adapters, and the log-probs of action tokens.

`load_base` loads the starting model. `Base` holds it with its chat format, makes the adapters or copies that
agents train (`attach`), and scores action tokens (`score`). `token_logprobs` is the shared arithmetic:

    log pi(token | tokens before it) = log softmax(output_layer(decoder(ids)) / temperature)[token]

Models stay in eval mode and every dropout rate is 0, in sampling, scoring and training: a ratio of policies
with different dropout masks would be meaningless. Only the decoder is run over a whole row. Logits are made
only at columns that predict action tokens, in chunks, so a tensor (B, T, V) never exists.

Left out: models with more than an output layer after the decoder (a cap or a scale), quantized weights, and
adapters other than LoRA.

Shapes: B rows, T tokens (columns), N action tokens of a batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batch import Batch
from chat import FORMAT, Chat
from record.model_checks import base_of_adapter, check_folder, check_keys, check_tokenizer, explained
from scale.shared_prompts import read_shared, split_prompts

CHUNK_LOGITS = 2**23  # elements of a (chunk, V) block of logits, 32 MB in fp32; six blocks are alive at once


def chunk_of(vocabulary: int) -> int:
    """Return the number of tokens whose logits are computed at a time."""
    return max(64, CHUNK_LOGITS // vocabulary)


def token_logprobs(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    with_entropy: bool = False,
) -> list[Tensor]:
    """Return [log softmax(logits / temperature)[target]], and the entropy if wanted; each (N,), fp32

    hidden (N, D): the states that predict the targets (N,). logits_of: the output layer, (N, D) -> (N, V).
    More than `chunk` tokens go chunk by chunk. Backward recomputes the logits of a chunk, so none are kept.
    """

    def score(hidden: Tensor, targets: Tensor) -> list[Tensor]:
        logprobs = torch.log_softmax(logits_of(hidden) / temperature, dim=-1)
        scores = [logprobs.gather(-1, targets[:, None])[:, 0]]
        if with_entropy:
            scores.append(-(logprobs.exp() * logprobs).sum(-1))
        return scores

    if len(hidden) <= chunk:
        return score(hidden, targets)
    parts = []
    for part in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        parts.append(checkpoint(score, *part, use_reentrant=False, preserve_rng_state=False))
    return [torch.cat(scores) for scores in zip(*parts, strict=True)]


def scatter_tokens(values: Tensor, places: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    """Write the values of action tokens (N,) to their places in (B, T), with 0 elsewhere."""
    return torch.zeros(batch.input_ids.shape, device=values.device).index_put(places, values)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters only: 16 bits would ruin the rotary frequencies, which are buffers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def recompute_layers(model) -> None:
    """Enable gradient checkpointing in the model's layers. It takes effect inside `recomputing`."""
    enable = "activation_checkpointing_enable"  # renamed within transformers 5
    enable = enable if hasattr(model, enable) else "gradient_checkpointing_enable"
    getattr(model, enable)({"use_reentrant": False})


@contextlib.contextmanager
def recomputing(model, wanted: bool):
    """Keep only the inputs of layers in forward passes, if wanted; backward recomputes the rest."""
    wanted = wanted and torch.is_grad_enabled()
    if wanted:
        model.train()  # layers checkpoint only in this mode, which changes nothing else: dropout is 0
    yield
    if wanted:
        model.eval()


def rise_and_fall(update: int, updates: int) -> float:
    """Return the factor of the learning rate in supervised update 0, 1, ...

    It rises linearly to 1 over the first tenth of the updates and then falls linearly towards 0.
    """
    rise = max(1, round(0.1 * updates))
    return min((update + 1) / rise, (updates - update) / max(1, updates - rise))


class Base:
    """The starting model, its chat format, and the adapters or copies that agents train.

    model, config: the causal LM and its text config. max_length: the tokens it can read. changed: the weights
    differ from those at the model's name_or_path, so they must be saved before another program can load them.
    reference: the frozen copy of the start (full weights only). peft: peft's wrapper (LoRA only).
    """

    def __init__(
        self, model, chat: Chat, device="cpu", gradient_checkpointing=False, changed=False, autocast=None
    ):
        """Move the model to the device and check it. Raises ValueError if it is damaged or not supported.

        autocast: compute matrix products in bf16. None: only if the stored weights are bf16, even where they
        are trained and therefore kept in fp32. Losses and softmaxes are always computed in fp32.
        """
        self.model, self.chat, self.device = model.to(device).eval(), chat, torch.device(device)
        self.config = model.config.get_text_config()
        self.max_length: int = getattr(self.config, "max_position_embeddings", None) or 2**30
        self.reference, self.peft = None, None
        self.active: str | None = None  # LoRA: name of the adapter in use; None: no adapter
        self.autocast, self._autocast_as_stored = bool(autocast), autocast is None
        self.changed = changed
        self.gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            recompute_layers(self.model)
        arguments = inspect.signature(model.get_decoder().forward).parameters
        self._cache_name = "cache" if "cache" in arguments else "past_key_values"  # renamed in transformers 5
        self._check_head()

    def _check_head(self) -> None:
        """Refuse a model whose logits are not output_layer(decoder(ids)), or depend on later tokens."""
        ids = torch.arange(8, device=self.device).repeat(2, 1) % self.config.vocab_size
        ids[1, -1] = 0  # the rows differ in their last token
        with torch.no_grad():
            with self._precision():
                logits = self.model(input_ids=ids, use_cache=False).logits.float()
            ours = self.logits(self.model, self.hidden(self.model, ids))
        if logits.isnan().any():
            raise ValueError(
                f"the logits of model {self.model.name_or_path!r} are not numbers: its weights are damaged"
            )
        if (logits[0, :-1] - logits[1, :-1]).abs().max() > 0.05 * logits.abs().max():
            raise ValueError(
                f"model type {self.config.model_type!r} is no causal LM: a token changes the logits before it"
            )
        if not torch.allclose(logits, ours, atol=1e-3 * logits.abs().max().item()):
            raise ValueError(
                f"model type {self.config.model_type!r} does more to its logits than its output layer "
                "(a cap or a scale): it is not supported"
            )

    def _precision(self):
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()

    def hidden(self, model, input_ids: Tensor, mask=None, positions=None, cache=None) -> Tensor:
        """Return the last hidden states (B, T, D). mask: (B, T), additive (B, 1, T, K), or None: causal."""
        cached = {"use_cache": False} if cache is None else {"use_cache": True, self._cache_name: cache}
        with self._precision():
            out = model.get_decoder()(
                input_ids=input_ids, attention_mask=mask, position_ids=positions, **cached
            )
        return out.last_hidden_state

    def logits(self, model, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., D), in fp32."""
        with self._precision():
            return model.get_output_embeddings()(hidden).float()

    def read(self, model, batch: Batch) -> Tensor:
        """Return the hidden states (B, T - 1, D) of all columns but the last: t - 1 predicts token t."""
        ids, mask, positions = batch.input_ids[:, :-1], batch.attention_mask[:, :-1], None
        if mask[:, 0].all():  # padded on the right: causal attention never sees the padding
            mask = None
        else:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
        with recomputing(model, self.gradient_checkpointing):
            return self.hidden(model, ids, mask, positions)

    def states(self, model, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the states (N, D) that predict action tokens, and the tokens' rows (N,) and columns (N,)."""
        assert not batch.action_mask[:, 0].any(), "nothing comes before an action token in column 0"
        rows, columns = batch.action_mask.nonzero(as_tuple=True)
        recomputed = self.gradient_checkpointing and torch.is_grad_enabled()  # then layers have no cache
        shared = None if recomputed else split_prompts(model, batch)
        if shared is None:
            return self.read(model, batch)[rows, columns - 1], (rows, columns)
        states = read_shared(functools.partial(self.hidden, model), shared, model.dtype)
        return states[rows, columns - shared.lengths[rows]], (rows, columns)

    def score(self, model, batch: Batch, temperature: float, with_entropy=False) -> list[Tensor]:
        """Return [log-probs] or [log-probs, entropy] of the action tokens; each (B, T), 0 elsewhere."""
        states, places = self.states(model, batch)
        logits_of = functools.partial(self.logits, model)
        chunk = chunk_of(self.config.vocab_size)
        scores = token_logprobs(logits_of, states, batch.input_ids[places], temperature, chunk, with_entropy)
        return [scatter_tokens(values, places, batch) for values in scores]

    def fp32(self) -> None:
        """Cast bf16 weights to fp32 before full fine-tuning; bf16 would round updates of 1e-6 to zero."""
        if self.model.dtype == torch.bfloat16:
            cast(self.model, torch.float32)
            self.autocast = self.autocast or self._autocast_as_stored

    def attach(self, name: str, lora_rank: int, lora_alpha: float, seed: int) -> tuple:
        """Make the weights of a new agent. Returns the model it runs and its parameters by name.

        They are a LoRA adapter on the base, or a copy of the start if lora_rank is 0. The first agent
        with full weights trains `model` itself, and `reference` keeps the start.
        """
        if lora_rank == 0:
            model = self.model
            if self.reference is None:
                self.fp32()
                self.reference = copy.deepcopy(model).requires_grad_(False)
            else:
                model = copy.deepcopy(self.reference)
            return model, dict(model.requires_grad_(True).named_parameters())

        import peft

        config = peft.LoraConfig(
            r=lora_rank,
            lora_alpha=lora_alpha,
            target_modules="all-linear",
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            torch.manual_seed(seed)  # the adapter depends on the seed only, not on earlier draws
            warnings.simplefilter("ignore", FutureWarning)  # peft uses what transformers deprecates
            if self.peft is None:
                self.peft = peft.get_peft_model(self.model.requires_grad_(False), config, adapter_name=name)
            else:
                self.peft.add_adapter(name, config)
        self.peft.to(self.device).eval()
        self.active = "unknown"  # peft may have switched adapters: the next `use` must switch
        own = {key: p for key, p in self.model.named_parameters() if _is_weight_of(key, name)}
        return self.model, own

    def use(self, name: str | None) -> None:
        """Switch to this LoRA adapter, or to the bare base for None.

        peft freezes and unfreezes adapters when it switches. Afterwards exactly the parameters of the adapter
        in use are trainable.
        """
        if self.peft is None or name == self.active:
            return
        if name is None:
            self.peft.base_model.disable_adapter_layers()
        else:
            self.peft.base_model.enable_adapter_layers()
            self.peft.set_adapter(name)
        self.active = name
        for key, p in self.model.named_parameters():
            assert p.requires_grad == _is_weight_of(key, name), f"{key} with adapter {name} in use"

    def save(self, folder: str | Path) -> None:
        """Save a folder for `load_base`. Adapters that are saved later name this folder as their base."""
        assert self.peft is None, "the base must be saved before it has adapters"
        self.model.save_pretrained(folder)
        self.chat.tokenizer.save_pretrained(folder)
        self.model.name_or_path, self.changed = str(Path(folder).resolve()), False


def _is_weight_of(key: str, adapter: str | None) -> bool:
    return ".lora_" in key and f".{adapter}." in key


# --- loading ------------------------------------------------------------------------------------------------

LOADABLE = "it must be a causal LM of transformers; give a folder, or a hub id that can be fetched"
OLD_MASK = r"\.attn\.(attention\.)?(masked_)?bias$"  # old GPT-2 and GPT-Neo files hold the causal mask
MERGE_TOLERANCE = 1e-3  # of log-probs in fp32; rounding gives 1e-5


def load_base(
    model: str,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    autocast: bool | None = None,
) -> Base:
    """Load a causal LM with a chat template from a folder or a hub id.

    A LoRA adapter in the folder is merged into the model it was trained on, so the reference is the merged
    model. Raises ValueError if the model cannot be loaded exactly as it is stored, or is not supported.
    """
    try:
        lm, chat, merged = _load(model, getattr(torch, dtype))
        return Base(lm, chat, device, gradient_checkpointing, merged, autocast)
    except ValueError as error:
        raise ValueError(f"--model {model}: {error}") from error


def _load(model: str, dtype: torch.dtype) -> tuple[nn.Module, Chat, bool]:
    """Return the model, its chat format, and True if an adapter was merged into it."""
    folder, start = Path(model), model
    check_folder(folder)
    is_adapter = (folder / "adapter_config.json").is_file()
    if is_adapter:
        start = base_of_adapter(folder)
        check_folder(Path(start))
    config = _load_config(start)
    with explained(f"cannot load the tokenizer of {model}", "copy the tokenizer files of its base model"):
        tokenizer = load_tokenizer(model)
    if not tokenizer.chat_template:
        raise ValueError("its tokenizer has no chat template; use an instruct model")
    lm = _load_lm(start, config, dtype)
    stop_ids = getattr(lm.generation_config, "eos_token_id", None)
    if not isinstance(stop_ids, list):
        stop_ids = [] if stop_ids is None else [stop_ids]
    with explained("its chat template cannot be used", "correct it, or copy that of its base model"):
        chat = Chat(tokenizer, stop_ids)
    check_tokenizer(chat, len(lm.get_input_embeddings().weight))
    if is_adapter:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns of what is counted and compared here
            warnings.filterwarnings("default", "Unexpected keyword arguments")  # an adapter of a newer peft
            lm = _merge(lm, folder, chat, dtype)
    return lm, chat, is_adapter


def _load_config(name: str):
    """Load the config with dropout rates of 0. Raises ValueError for quantized weights, and hub adapters."""
    from transformers import AutoConfig
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(name):  # of a hub id; transformers would add the adapter, unmerged
        raise ValueError(f"{name} is an adapter on a hub; download it and give its folder")
    with explained(f"cannot load {name}", LOADABLE):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)  # None would ask on stdin
    if getattr(config, "quantization_config", None):
        raise ValueError(f"the weights of {name} are quantized; give the model that they were made from")
    for part in (config, config.get_text_config()):
        for key, value in list(vars(part).items()):
            if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
                setattr(part, key, 0.0)
    return config


def _load_lm(name: str, config, dtype: torch.dtype):
    """Load the model. Raises ValueError unless its weights are exactly those of the folder."""
    from transformers import AutoModelForCausalLM

    logging.getLogger("transformers.modeling_utils").addFilter(_is_no_load_report)
    with explained(f"cannot load {name}", LOADABLE):
        lm, report = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
            trust_remote_code=False,
        )
        unexpected = [key for key in report["unexpected_keys"] if not re.search(OLD_MASK, key)]
        mismatched = [key for key, *_ in report["mismatched_keys"]]
        check_keys("its weights", report["missing_keys"], unexpected, mismatched)
    return lm


def _is_no_load_report(record: logging.LogRecord) -> bool:
    """Return False for the table of keys that do not fit, and its like: `check_keys` says it in a line."""
    return not re.search("LOAD REPORT|This checkpoint seem corrupted", record.getMessage())


def load_tokenizer(name: str | Path):
    """Load the tokenizer as it was saved. AutoTokenizer would give a tiny Qwen2 model Qwen's own words."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = Path(name) / "tokenizer_config.json"
    kind = json.loads(settings.read_text()).get("tokenizer_class") if settings.exists() else None
    if kind in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        return PreTrainedTokenizerFast.from_pretrained(name)
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


# --- adapters -----------------------------------------------------------------------------------------------


def _merge(lm, folder: Path, chat: Chat, dtype: torch.dtype):
    """Merge the adapter into the model in fp32, compare their log-probs on a prompt, and cast the result.

    Raises ValueError if the merged model is not the model with its adapter, or if `dtype` cannot hold it.
    """
    ids = torch.tensor([chat.first(FORMAT)[:64]])

    def logprobs(model) -> Tensor:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits.log_softmax(-1)

    def distance(a: Tensor, b: Tensor) -> float:
        return (a - b).square().mean().sqrt().item()

    cast(lm, torch.float32)
    without = logprobs(lm)
    with explained(f"cannot load the adapter {folder}", "give an adapter that peft saved for this base"):
        tuned = _add_adapter(lm, folder)
        adapted = logprobs(tuned)
        if adapted.isnan().any():
            raise ValueError("its weights are not numbers")
    with explained(f"cannot merge the adapter {folder}", "give the merged model"):
        merged = tuned.merge_and_unload()
        gap = distance(logprobs(merged), adapted)
        if gap > MERGE_TOLERANCE:
            raise ValueError(
                f"log-probs change by {gap:.1g}; does it adapt an embedding that is the output too?"
            )
    cast(merged, dtype)
    cast(merged, torch.float32)
    lost, effect = distance(logprobs(merged), adapted), distance(adapted, without)
    if lost > gap + effect / 2:
        why = f"it changes log-probs by {effect:.1g}, and rounding the merged weights by {lost:.1g}"
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"the adapter {folder} is lost in {name}: {why}; give --dtype float32")
    cast(merged, dtype)
    return merged


def _add_adapter(lm, folder: Path):
    """Return peft's model with the adapter. Raises ValueError for missing, unknown or mismatched weights."""
    import peft

    tuned = peft.PeftModel.from_pretrained(lm, folder, ignore_mismatched_sizes=True)
    report = tuned.load_adapter(folder, "default", ignore_mismatched_sizes=True)
    saved = peft.load_peft_weights(folder, device="cpu")
    held = peft.get_peft_model_state_dict(tuned, save_embedding_layers=False)
    expected = {**tuned.state_dict(), **held}
    mismatched = [key for key in saved if key in expected and saved[key].shape != expected[key].shape]
    missing = {key.replace(".default.", ".") for key in report.missing_keys}.difference(mismatched)
    missing.update(key for key in held if key.endswith(".bias") and key not in saved)
    check_keys("its weights", missing, report.unexpected_keys, mismatched)
    return tuned
