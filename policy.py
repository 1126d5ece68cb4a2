"""The agents: a causal language model, its chat format, and the trainable weights of A, B and their critics.

A (`Policy` "policy") and B (its `fork` "explorer") share one frozen base: each is a LoRA adapter, a critic is
one more with a linear head, and the reference is "adapters off". With `lora_rank=0` they are whole copies
instead and the reference is a frozen one. Every agent has its own AdamW, so training one moves nothing of
another.

The order is `base = load_base(...)`, `warm_start(base, ...)` where the model cannot act yet, `Policy(base,
...)`: the reference is whatever the base is when the Policy is made.

Models stay in eval mode and every dropout of their config is 0, in scoring and in training alike: a ratio of
policies that differ by a dropout mask would mean nothing. Only the base decoder is run over a row; the
vocabulary is reached from the columns that predict action tokens alone, in chunks, so (B, T, V) never exists.

Shapes: B rows, T tokens (columns), N action tokens of a batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import math
import random
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from buffer import Batch, Row, Trajectory, endings, micro_batches, rows_of
from envs import Corpus

TODAY = "26 Jul 2024"  # what chat templates are told: prompts must not depend on the day of the run
CHUNK_LOGITS = 2**23  # elements of a (chunk, V) block of logits: 32 MB in fp32; six are alive at once


# --- text to tokens and back ----------------------------------------------------------------------


class Chat:
    """A tokenizer and its chat template as an append-only format: what a turn adds changes nothing before it.

    The template is rendered once, with sentinels for the texts; what lies between them is the glue. Texts are
    then encoded on their own, so that control tokens written inside a text stay plain text, and sampled token
    ids are never decoded and encoded again.
    """

    def __init__(self, tokenizer, stop_ids: Iterable[int] = ()):
        from jinja2 import TemplateError

        self.tokenizer = tokenizer
        user, system, reply, later = "RSPOuserRSPO", "RSPOsystemRSPO", "RSPOreplyRSPO", "RSPOlaterRSPO"
        turn = {"role": "user", "content": user}
        start, generate = self._render([turn]).split(user)
        answered = [turn, {"role": "assistant", "content": reply}, {"role": "user", "content": later}]
        between = self._render(answered).split(reply)[1].split(later)[0]
        self._start, self._generate, self._between = map(self._glue, (start, generate, between))
        try:
            opening = self._render([{"role": "system", "content": system}, turn]).split(user)[0]
        except TemplateError:  # the template refuses the role
            opening = ""
        self._opening = list(map(self._glue, opening.split(system))) if system in opening else None
        end = self._between[0] if self._between else None
        if end not in tokenizer.all_special_ids and end not in tokenizer.added_tokens_decoder:
            raise ValueError(
                "the chat template does not close an assistant turn with a control token: "
                f"after a reply it puts {between!r}"
            )
        self.end_id = end  # closes an assistant turn
        ends = [end, *stop_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
        self.stop_ids = sorted(set(ends))
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.stop_ids[0]
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._word_level = backend is not None and type(backend.model).__name__ == "WordLevel"
        if (
            self._word_level
        ):  # its texts are short and come again and again; others would only fill the memory
            self._encode = functools.lru_cache(maxsize=2**16)(self._encode)
            self._decode = functools.lru_cache(maxsize=2**16)(self._decode)

    def _render(self, messages: list[dict[str, str]]) -> str:
        """Ends with the generation prompt. A template that asks for the date, or the clock, gets TODAY."""
        clock = f"{{% macro strftime_now(format) %}}{TODAY}{{% endmacro %}}"
        return self.tokenizer.apply_chat_template(
            messages,
            chat_template=clock + self.tokenizer.get_chat_template(),
            tokenize=False,
            add_generation_prompt=True,
            date_string=TODAY,
        )

    def _glue(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _decode(self, ids: tuple[int, ...]) -> str:
        return self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    def encode(self, text: str) -> list[int]:
        """Plain text: a control token spelled out in it is spelled in ordinary tokens."""
        # Between words a word-level text may be cut; its parts repeat much more than the whole
        parts = re.split(r"(?=\|)", text) if self._word_level else [text.strip()]
        return [i for part in parts for i in self._encode(part)]

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, stop tokens left out."""
        return self._decode(tuple(i for i in ids if i not in self.stop_ids))

    def first(self, user: str, system: str | None = None) -> list[int]:
        """A chat's first prompt. With no system message the template's own default, if any, stands."""
        if system is None:
            return [*self._start, *self.encode(user), *self._generate]
        if self._opening is None:  # a template without system messages: it goes before the user's text
            return self.first(f"{system.strip()}\n\n{user.strip()}")
        before, after = self._opening
        return [*before, *self.encode(system), *after, *self.encode(user), *self._generate]

    def extend(self, action_ids: list[int], user: str) -> list[int]:
        """What follows prompt + action_ids: the turn's end if it was not sampled, and the next user turn."""
        stopped = bool(action_ids) and action_ids[-1] in self.stop_ids
        return [*self._between[stopped:], *self.encode(user), *self._generate]

    def reply(self, text: str) -> list[int]:
        """The token ids of a turn that says `text` and ends."""
        return [*self.encode(text), self.end_id]


# Words that tell a tiny model nothing are left out of its prompts; no action holds one of them.
SILENT = r"\b(?:a|an|the|you|see|and|is|are|it|of|middle|room|looking|quickly|around|arrive|at|on|in)\b|[,.]"
UNIT = r"go to|[a-z]+ \d+|[a-z]+|\d+|[^\sa-z\d]"  # "mug 1" is one token, and so is the verb "go to"
TINY_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant>{{ message.content }}<end>"
    "{% else %}<user>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer(vocabulary: tuple[str, ...] | Corpus):
    """Of all the words of a closed vocabulary, or trained on the texts of an open one."""
    from transformers import PreTrainedTokenizerFast

    control = ["<pad>", "<unk>", "<user>", "<assistant>", "<end>"]
    if isinstance(vocabulary, Corpus):
        tokenizer = _subword_tokenizer(vocabulary, control)
    else:
        tokenizer = _word_tokenizer(vocabulary, control)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        extra_special_tokens=["<user>", "<assistant>"],
        chat_template=TINY_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _word_tokenizer(vocabulary: Iterable[str], control: list[str]):
    """One token a word, and one for a named thing such as "mug 1". Unknown words become <unk>."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    texts = (re.sub(SILENT, " ", text.lower()) for text in vocabulary)
    words = sorted({unit for text in texts for unit in re.findall(UNIT, text)})
    ids = {word: i for i, word in enumerate(control + words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(SILENT), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(UNIT), "removed", invert=True)
    return tokenizer


def _subword_tokenizer(corpus: Corpus, control: list[str]):
    """Byte-level BPE of lower-cased text. A word has the same tokens wherever it stands, in brackets too, so
    that copying a text from the prompt into an action means copying its tokens."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE())
    brackets = [normalizers.Replace("[", "[ "), normalizers.Replace("]", " ]")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), *brackets, normalizers.Prepend(" ")]
    )
    words = pre_tokenizers.Split(Regex(r" ?[a-z]+| ?\d+| ?[^\sa-z\d]|\s"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = decoders.Sequence(
        [
            *(decoders.ByteLevel(), decoders.Replace("[ ", "["), decoders.Replace(" ]", "]")),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=corpus.size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=control,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.texts, trainer)
    tokenizer.add_tokens([AddedToken(name, lstrip=True, normalized=True) for name in corpus.names])
    return tokenizer


# --- the base model -------------------------------------------------------------------------------


def check_model(model: str) -> None:
    """Cheap check before anything loads: a folder must hold a model, a tokenizer and a chat template."""
    path = Path(model)
    if model == "tiny" or not (path.exists() or model.startswith(("/", ".", "~")) or model.count("/") > 1):
        return  # built here, or the id of a hub model
    if not path.is_dir():
        raise ValueError(f"--model {model}: there is no such folder; give one, a hub id, or 'tiny'")

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
    vocabulary: tuple[str, ...] | Corpus | None = None,
    d_model: int = 64,
    layers: int = 2,
    heads: int = 4,
    intermediate: int = 256,
    max_length: int = 1024,
    seed: int = 0,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    autocast: bool | None = None,
) -> Base:
    """`model`: a folder, a hub id, or "tiny": a Qwen2 of the given sizes over the environment's `vocabulary`.

    A folder that holds a LoRA adapter is merged into the model it was trained from, so the reference is the
    start.
    """
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    if model == "tiny":
        if vocabulary is None:
            raise ValueError("--model tiny needs an environment whose words are known, such as household")
        lm, tokenizer = _tiny_model(vocabulary, d_model, layers, heads, intermediate, max_length, seed)
        cast(lm, kind)
    else:
        check_model(model)
        lm, tokenizer = _load_pretrained(model, kind)
    eos = getattr(lm.generation_config, "eos_token_id", None)
    chat = Chat(tokenizer, eos if isinstance(eos, list) else [] if eos is None else [eos])
    changed = model == "tiny" or (Path(model) / "adapter_config.json").exists()
    return Base(lm, chat, device, gradient_checkpointing, changed, autocast)


def _tiny_model(vocabulary, d_model, layers, heads, intermediate, max_length, seed):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = tiny_tokenizer(vocabulary)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=d_model,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        initializer_range=0.1,  # the usual 0.02 is for wide models: a model this narrow hardly learns from it
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config), tokenizer


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


# --- log-probs ------------------------------------------------------------------------------------


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


# --- agents ---------------------------------------------------------------------------------------


class Agent:
    """Weights that are trained, an adapter on the base or a whole copy, and the AdamW that moves them."""

    def __init__(self, base: Base, name: str, *, lora_rank, lora_alpha, seed, head=None, **adamw):
        self.base, self.name, self.version = base, name, 0
        self.model, self.named = base.attach(name, lora_rank, lora_alpha, seed)
        if head is not None:
            self.named |= {f"head.{key}": p for key, p in head.named_parameters()}
        self.parameters = list(self.named.values())
        assert self.parameters and all(p.dtype == torch.float32 for p in self.parameters)
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True, **adamw)

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def chat(self) -> Chat:
        return self.base.chat

    @property
    def max_length(self) -> int:
        return self.base.max_length

    def activate(self) -> nn.Module:
        """The causal LM with this agent's weights in use, in eval mode."""
        self.base.use(self.name)
        return self.model

    def _mine(self, values: Tensor) -> Tensor:
        """Backward may find another agent in use and this one frozen, and autograd would silently pass it by:
        have it put this agent back before the gradient gets there."""
        if values.requires_grad:
            values.register_hook(lambda gradient: self.activate() and None)
        return values

    def step(self, max_grad_norm: float) -> float:
        """Clip, one AdamW step, gradients dropped. Returns the gradient's norm before clipping."""
        if all(p.grad is None for p in self.parameters):
            raise RuntimeError(f"no gradient has reached agent {self.name!r}: nothing to step on")
        norm = nn.utils.clip_grad_norm_(self.parameters, max_grad_norm).item()
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise FloatingPointError(
                f"the gradient of agent {self.name!r} has norm {norm}: lower its learning rate"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        return norm

    @torch.no_grad()
    def copy_from(self, other: Agent) -> None:
        """Take the other's weights and AdamW state, by value."""
        torch._foreach_copy_(self.parameters, other.parameters)
        self.optimizer.state.clear()
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            if theirs in other.optimizer.state:
                state = other.optimizer.state[theirs]
                self.optimizer.state[mine] = {k: v.clone() for k, v in state.items()}
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Copies on the CPU of the weights and the AdamW state: `weight/<name>`, `exp_avg/<name>`, ..."""
        state = {f"weight/{name}": p for name, p in self.named.items()}
        for name, p in self.named.items():
            state |= {f"{key}/{name}": value for key, value in self.optimizer.state.get(p, {}).items()}
        return {key: value.detach().to("cpu", copy=True) for key, value in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from there: the parameters stay the same trainable tensors, only their values change."""
        expected = {f"weight/{name}" for name in self.named}
        given = {key for key in state if key.startswith("weight/")}
        if expected != given:
            raise ValueError(
                f"these weights are of another model: {sorted(expected ^ given)[:4]} do not match"
            )
        self.optimizer.state.clear()
        for name, p in self.named.items():
            p.copy_(state[f"weight/{name}"])
            moments = [k for k in ("step", "exp_avg", "exp_avg_sq") if f"{k}/{name}" in state]
            if moments:
                self.optimizer.state[p] = {k: state[f"{k}/{name}"].to(p.device, copy=True) for k in moments}
        self.version += 1


class Policy(Agent):
    """An agent that acts: A, or by `fork` B. `temperature` is that of training, of samples and scores alike.

    With a `critic_learning_rate` it has a `critic` (PPO). `version` changes whenever the weights do.
    """

    def __init__(
        self,
        base: Base,
        name: str = "policy",
        *,
        lora_rank: int = 0,
        lora_alpha: float = 64.0,
        learning_rate: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        critic_learning_rate: float | None = None,
        temperature: float = 1.0,
        seed: int = 0,
    ):
        adamw = {"betas": betas, "weight_decay": weight_decay}
        lora = {"lora_rank": lora_rank, "lora_alpha": lora_alpha, "seed": seed}
        super().__init__(base, name, lr=learning_rate, **lora, **adamw)
        self.temperature = temperature
        self.critic = None
        if critic_learning_rate is not None:
            self.critic = Critic(base, f"{name}_critic", lr=critic_learning_rate, **lora, **adamw)
        self._recipe = {
            "learning_rate": learning_rate,
            "critic_learning_rate": critic_learning_rate,
            "temperature": temperature,
            **lora,
            **adamw,
        }
        self._explorer, self._discarded = None, False

    def activate(self) -> nn.Module:
        if self._discarded:
            raise RuntimeError(f"agent {self.name!r} was discarded: fork a new one")
        return super().activate()

    def hidden(self, input_ids: Tensor, mask=None, positions=None, cache=None) -> Tensor:
        """This agent's last hidden states (B, T, D), for samplers."""
        return self.base.hidden(self.activate(), input_ids, mask, positions, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.base.logits(self.model, hidden)

    def logprobs(self, batch: Batch, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """log pi(token | what is before it) at the training temperature, and the entropy there: (B, T), fp32,
        0 off the action columns. Gradients flow to this agent alone."""
        scores = self.base.score(self.activate(), batch, self.temperature, with_entropy)
        logprobs, *entropy = map(self._mine, scores)
        return logprobs, entropy[0] if with_entropy else None

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch) -> Tensor:
        """The same of the starting model (B, T)."""
        self.base.use(None)
        model = self.base.model if self.base.reference is None else self.base.reference
        return self.base.score(model, batch, self.temperature)[0]

    def fork(self, name: str) -> Policy:
        """B: a copy of this agent's weights and AdamW state. Its tensors are kept from fork to fork, as is
        its critic, which is its own and is not copied."""
        if self._explorer is None:
            self._explorer = Policy(self.base, name, **self._recipe)
        self._explorer._discarded = False
        self._explorer.copy_from(self)
        return self._explorer

    def discard(self) -> None:
        """This agent can no longer be used. Its storage is kept for the next fork."""
        self._discarded = True

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        """All that a run continues from: "policy", and for PPO "critic" and "explorer_critic"."""
        states = {"policy": self.state_dict()}
        if self.critic is not None:
            states["critic"] = self.critic.state_dict()
            if self._explorer is not None:
                states["explorer_critic"] = self._explorer.critic.state_dict()
        return states

    def load_state_dicts(self, states: dict[str, dict[str, Tensor]]) -> None:
        self.load_state_dict(states["policy"])
        if "critic" in states:
            self.critic.load_state_dict(states["critic"])
        if "explorer_critic" in states:
            explorer = self.fork("explorer")
            explorer.critic.load_state_dict(states["explorer_critic"])
            explorer.discard()

    def save(self, folder: str | Path) -> None:
        """For `PeftModel.from_pretrained` (LoRA) or `AutoModelForCausalLM` (full), with the tokenizer."""
        if self.base.peft is None:
            self.model.save_pretrained(folder)
        else:
            self.save_adapter(folder)
        self.chat.tokenizer.save_pretrained(folder)

    def save_adapter(self, folder: str | Path) -> None:
        """LoRA: the adapter alone, as peft and vLLM load it."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        Path(folder).mkdir(parents=True, exist_ok=True)
        weights = get_peft_model_state_dict(self.base.peft, adapter_name=self.name)
        weights = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
        save_file(weights, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
        self.base.peft.peft_config[self.name].save_pretrained(folder)


class Critic(Agent):
    """V(the state before a token): an adapter or copy of its own, and a linear head that starts at 0."""

    def __init__(self, base: Base, name: str, **settings):
        self.head = nn.utils.skip_init(nn.Linear, base.config.hidden_size, 1, device=base.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        super().__init__(base, name, head=self.head, **settings)

    def values(self, batch: Batch) -> Tensor:
        """(B, T): at an action token's column the value of the state before it, 0 elsewhere."""
        states, places = self.base.states(self.activate(), batch)
        return self._mine(put(self.head(states.float())[:, 0], places, batch))


# --- warm start -----------------------------------------------------------------------------------


def rise_and_fall(update: int, updates: int) -> float:
    """The share of the learning rate in supervised update 0, 1, ...: up over a tenth of them, then to 0."""
    rise = max(1, round(0.1 * updates))
    return min((update + 1) / rise, (updates - update) / max(1, updates - rise))


def warm_start(
    base: Base,
    demonstrations: list[Trajectory],
    *,
    updates: int,
    turns_per_update: int,
    learning_rate: float,
    seed: int = 0,
    tokens_per_micro_batch: int = 4096,
    progress: Callable[[int, float], None] = lambda update, loss: None,
) -> list[float]:
    """Supervised learning of the base itself, full weights, before agents exist: mean cross-entropy of the
    demonstrated action tokens. An update takes rows until they hold `turns_per_update` turns, in an order
    that is shuffled anew when all were seen. The learning rate rises and falls. Returns the losses.

    Raises ValueError if no demonstration is usable, FloatingPointError if the loss diverges.
    """
    assert base.peft is None and base.reference is None, "warm start comes before the agents"
    rows = [row for trajectory in demonstrations if trajectory.usable for row in rows_of(trajectory)]
    if not rows:
        raise ValueError(f"no demonstration can be learned from; they ended so: {endings(demonstrations)}")
    rng, order, dtype, autocast = random.Random(seed), [], base.model.dtype, base.autocast
    base.fp32()
    parameters = list(base.model.requires_grad_(True).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, fused=True)
    losses = []
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = learning_rate * rise_and_fall(update, updates)
        chosen: list[Row] = []
        while sum(len(row.spans) for row in chosen) < turns_per_update:
            order = order or rng.sample(rows, len(rows))
            chosen.append(order.pop())
        count, total = sum(row.action_tokens for row in chosen), 0.0
        for batch in micro_batches(chosen, tokens_per_micro_batch, base.chat.pad_id, base.device):
            loss = -base.score(base.model, batch, temperature=1.0)[0].sum() / count
            loss.backward()
            total += loss.item()
        if not math.isfinite(total):
            raise FloatingPointError(
                f"the warm start diverged at update {update + 1} of {updates}: lower its learning rate of "
                f"{learning_rate:g}"
            )
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        progress(update, total)
    cast(base.model.requires_grad_(False), dtype)
    base.autocast, base.changed = autocast, True
    return losses
