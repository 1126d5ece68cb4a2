"""A causal language model: loading, precision, adapters, log-probs of action tokens."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batch import Batch
from chat import Chat

CHUNK_LOGITS = 2**23  # elements of a (chunk, V) block of logits: 32 MB in fp32; six are alive at once


def check_model(model: str) -> None:
    """Cheap check before anything loads: a folder must hold a model, a tokenizer and a chat template."""
    path = Path(model)
    if not (path.exists() or model.startswith(("/", ".", "~")) or model.count("/") > 1):
        return  # the id of a hub model
    if not path.is_dir():
        raise ValueError(f"--model {model}: there is no such folder; give one, a hub id, or tiny")

    def holds(*names: str) -> bool:
        return any((path / name).exists() for name in names)

    def wanting(what: str, remedy: str) -> ValueError:
        return ValueError(f"--model {model}: the folder has no {what}; {remedy}")

    if not holds("config.json", "adapter_config.json"):
        raise wanting("config.json", "point to a folder written by save_pretrained")
    if not holds("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model"):
        raise wanting("tokenizer", "copy the tokenizer files of the model it comes from into it")
    settings = path / "tokenizer_config.json"
    if not holds("chat_template.jinja", "chat_template.json") and not (
        settings.exists() and json.loads(settings.read_text()).get("chat_template")
    ):
        raise wanting("chat template", "use an instruct model, or add a chat_template.jinja")


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Of the parameters alone: rotary frequencies, which are buffers, would be ruined in 16 bits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def recompute_layers(model) -> None:
    """Prepare a model's layers for `recomputing`."""
    enable = "activation_checkpointing_enable"  # renamed within transformers 5
    enable = enable if hasattr(model, enable) else "gradient_checkpointing_enable"
    getattr(model, enable)({"use_reentrant": False})


@contextlib.contextmanager
def recomputing(model, wanted: bool):
    """Forward passes in here keep the inputs of layers alone, and backward computes the rest again."""
    wanted = wanted and torch.is_grad_enabled()
    if wanted:
        model.train()  # layers checkpoint only in this mode, which changes nothing else: dropout is 0
    yield
    if wanted:
        model.eval()


class Base:
    """The starting model on its device, its chat format, and the adapters or copies that agents train."""

    def __init__(
        self, model, chat: Chat, device="cpu", gradient_checkpointing=False, changed=False, autocast=None
    ):
        """autocast: matrix products in bf16, whatever the weights are stored in; None: those of a bf16 model
        alone, also where they are trained and so kept in fp32. Losses and softmaxes are fp32 always."""
        self.model, self.chat, self.device = model.to(device).eval(), chat, torch.device(device)
        self.config = model.config.get_text_config()
        self.max_length: int = getattr(self.config, "max_position_embeddings", None) or 2**30
        self.reference = None  # full weights: the frozen copy; LoRA needs none
        self.peft, self.active = None, None  # LoRA: peft's wrapper, and which adapter is on (None: none)
        self.autocast, self._as_stored = bool(autocast), autocast is None
        self.changed = changed  # it is not what its name_or_path holds: save it to be able to load it again
        self.gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            recompute_layers(self.model)
        takes = inspect.signature(model.get_decoder().forward).parameters
        self._cache_name = "cache" if "cache" in takes else "past_key_values"  # renamed within transformers 5
        self._check_head()

    def _check_head(self) -> None:
        """Log-probs are made from output_layer(decoder(ids)): refuse a model that does more than that."""
        ids = torch.arange(8, device=self.device)[None] % self.config.vocab_size
        with torch.no_grad():
            with self._precision():
                logits = self.model(input_ids=ids, use_cache=False).logits.float()
            ours = self.logits(self.model, self.hidden(self.model, ids))
        if logits.isnan().any():
            raise ValueError(
                f"the logits of model {self.model.name_or_path!r} are not numbers: its weights are damaged"
            )
        if not torch.allclose(logits, ours, atol=1e-3 * logits.abs().max().item()):
            raise ValueError(
                f"model type {self.config.model_type!r} does more to its logits than its output layer "
                "(a cap or a scale): it is not supported"
            )

    def _precision(self):
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()

    def hidden(self, model, input_ids: Tensor, mask=None, positions=None, cache=None) -> Tensor:
        """The last hidden states (B, T, D). `mask`: (B, T), additive (B, 1, T, K), or None: causal."""
        cached = {"use_cache": False} if cache is None else {"use_cache": True, self._cache_name: cache}
        with self._precision():
            out = model.get_decoder()(
                input_ids=input_ids, attention_mask=mask, position_ids=positions, **cached
            )
        return out.last_hidden_state

    def logits(self, model, hidden: Tensor) -> Tensor:
        """fp32 (..., V)."""
        with self._precision():
            return model.get_output_embeddings()(hidden).float()

    def read(self, model, batch: Batch) -> Tensor:
        """Hidden states of all columns but the last (B, T - 1, D): column t - 1 is what predicts token t."""
        ids, mask, positions = batch.input_ids[:, :-1], batch.attention_mask[:, :-1], None
        if mask[:, 0].all():  # padded on the right: causality alone keeps the padding out of sight
            mask = None
        else:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
        with recomputing(model, self.gradient_checkpointing):
            return self.hidden(model, ids, mask, positions)

    def states(self, model, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What predicts the action tokens (N, D), and these tokens' places: rows (N,) and columns (N,)."""
        assert not batch.action_mask[:, 0].any(), "nothing comes before an action token in column 0"
        rows, columns = batch.action_mask.nonzero(as_tuple=True)
        return self.read(model, batch)[rows, columns - 1], (rows, columns)

    def score(self, model, batch: Batch, temperature: float, with_entropy=False) -> list[Tensor]:
        """[log-probs] or [log-probs, entropy] at the action tokens (B, T)."""
        states, places = self.states(model, batch)
        logits_of = functools.partial(self.logits, model)
        chunk = chunk_of(self.config.vocab_size)
        scores = token_logprobs(logits_of, states, batch.input_ids[places], temperature, chunk, with_entropy)
        return [put(values, places, batch) for values in scores]

    def fp32(self) -> None:
        """Before full weights are trained: an update of 1e-6 is below the resolution of bf16."""
        if self.model.dtype == torch.bfloat16:
            cast(self.model, torch.float32)
            self.autocast = self.autocast or self._as_stored

    def attach(self, name: str, lora_rank: int, lora_alpha: float, seed: int):
        """What an agent runs and its parameters by name: a new adapter, or at rank 0 a copy of the start."""
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
            torch.manual_seed(seed)  # the seed's own draws, whatever was drawn before
            warnings.simplefilter("ignore", FutureWarning)  # peft uses what transformers deprecates
            if self.peft is None:
                self.peft = peft.get_peft_model(self.model.requires_grad_(False), config, adapter_name=name)
            else:
                self.peft.add_adapter(name, config)
        self.peft.to(self.device).eval()
        self.active = "new"  # peft may have switched
        own = {k: p for k, p in self.model.named_parameters() if ".lora_" in k and f".{name}." in k}
        return self.model, own

    def use(self, name: str | None) -> None:
        """LoRA: have this adapter on, None for the bare base. peft freezes and thaws adapters as it switches:
        after a switch exactly the parameters of the adapter in use are trainable."""
        if self.peft is None or name == self.active:
            return
        if name is None:
            self.peft.base_model.disable_adapter_layers()
        else:
            self.peft.base_model.enable_adapter_layers()
            self.peft.set_adapter(name)
        self.active = name
        for key, p in self.model.named_parameters():
            mine = ".lora_" in key and f".{name}." in key
            assert p.requires_grad == mine, f"{key} with adapter {name} in use"

    def save(self, folder: str | Path) -> None:
        """What `load_base` loads. Adapters that are saved later name this folder as their base."""
        assert self.peft is None, "the base is saved before it carries adapters"
        self.model.save_pretrained(folder)
        self.chat.tokenizer.save_pretrained(folder)
        self.model.name_or_path, self.changed = str(Path(folder).resolve()), False


def load_base(
    model: str,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    autocast: bool | None = None,
) -> Base:
    """Load a causal LM with a chat template from a folder or a hub id.

    A folder that holds a LoRA adapter is merged into the model it was trained from, so the reference is the
    merged model. Raises ValueError if the model cannot be loaded.
    """
    check_model(model)
    lm, tokenizer = _load_pretrained(model, getattr(torch, dtype))
    eos = getattr(lm.generation_config, "eos_token_id", None)
    chat = Chat(tokenizer, eos if isinstance(eos, list) else [] if eos is None else [eos])
    changed = (Path(model) / "adapter_config.json").exists()
    return Base(lm, chat, device, gradient_checkpointing, changed, autocast)


def _load_pretrained(model: str, dtype: torch.dtype):
    from transformers import AutoConfig, AutoModelForCausalLM

    adapter = Path(model) / "adapter_config.json"
    start = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else model
    try:
        config = AutoConfig.from_pretrained(start)
        for part in (config, config.get_text_config()):
            for name, value in list(vars(part).items()):
                if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                    setattr(part, name, 0.0)
        lm = AutoModelForCausalLM.from_pretrained(start, config=config, dtype=dtype)
        tokenizer = _load_tokenizer(model)
    except OSError as error:
        raise ValueError(
            f"--model {model}: cannot load {start} ({' '.join(str(error).split())}); "
            "give a folder, or a hub id that can be fetched"
        ) from error
    if adapter.exists():
        import peft

        lm = peft.PeftModel.from_pretrained(lm, model).merge_and_unload()
    if not tokenizer.chat_template:
        raise ValueError(f"--model {model}: its tokenizer has no chat template; use an instruct model")
    return lm, tokenizer


def _load_tokenizer(model: str):
    """AutoTokenizer gives every Qwen2 model Qwen's own tokenizer, a tiny one's with other words included."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = Path(model) / "tokenizer_config.json"
    kind = json.loads(settings.read_text()).get("tokenizer_class") if settings.exists() else None
    as_saved = kind in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return (PreTrainedTokenizerFast if as_saved else AutoTokenizer).from_pretrained(model)


def chunk_of(vocabulary: int) -> int:
    """Tokens whose logits are computed at a time."""
    return max(64, CHUNK_LOGITS // vocabulary)


def token_logprobs(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    with_entropy: bool = False,
) -> list[Tensor]:
    """[log softmax(logits / temperature)[target]] of N tokens, with their entropy if asked; each (N,), fp32

    hidden (N, D) are the states that predict the targets (N,). More than `chunk` tokens go chunk by chunk,
    and backward recomputes each chunk's logits instead of keeping them.
    """

    def score(hidden: Tensor, targets: Tensor) -> list[Tensor]:
        logprobs = torch.log_softmax(logits_of(hidden) / temperature, dim=-1)
        scores = [logprobs.gather(-1, targets[:, None])[:, 0]]
        return [*scores, -(logprobs.exp() * logprobs).sum(-1)] if with_entropy else scores

    if len(hidden) <= chunk:
        return score(hidden, targets)
    parts = [
        checkpoint(score, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return [torch.cat(scores) for scores in zip(*parts, strict=True)]


def put(values: Tensor, places: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    """Values of the action tokens (N,) on their places in (B, T), 0 elsewhere."""
    return torch.zeros(batch.input_ids.shape, device=values.device).index_put(places, values)


def rise_and_fall(update: int, updates: int) -> float:
    """The share of the learning rate in supervised update 0, 1, ...: up over a tenth of them, then to 0."""
    rise = max(1, round(0.1 * updates))
    return min((update + 1) / rise, (updates - update) / max(1, updates - rise))
