"""Estimate the memory of a run on one GPU, and the size of one of its loops: `python train.py --plan`.

The plan is arithmetic on the model's config and the flags; no weights are loaded. Its numbers are upper
bounds: every prompt and every reply has its greatest length, and every micro-batch is full. 1 GB is 10^9
bytes.

Memory is estimated for each moment that can be a run's largest: `rollout` (one turn of --parallel_episodes),
`update` (the backward pass of one micro-batch) and, if the run has them, `reward model fit` and `warm start`.
The parts of an update are:
    resident parts      weights, adapters or trained copies, AdamW's two moments, gradients
    activations         the tensors that autograd keeps for a micro-batch, counted as transformers, peft and
                        torch's fused attention keep them. With gradient checkpointing: the inputs of all
                        layers, and all tensors of one layer. PPO doubles them: its critic has a second graph
    working memory      the gradients that are alive at once in one layer (or a forward pass's temporaries)
    log-probs           hidden states of the action tokens, and several blocks of model.CHUNK_LOGITS logits
    slack               SLACK of all parts that come and go, because allocators cannot use every gap; and
                        CONTEXT for the GPU's libraries
With --sampler vllm, the engine's share of the GPU replaces the rollout's own parts. It stays during updates.
tests/scale/test_plan.py measures the peak of an update on a CPU: the estimate is within 15 % of the peak.
Not included: freed memory that glibc keeps. It can be as large as the activations unless
MALLOC_MMAP_THRESHOLD_=65536 is set.

Left out: attention that is not fused (it would keep a block of (B, heads, T, T)), quantised weights, mixtures
of experts, sharding over GPUs, and the environments, which use the CPU's memory.

Shapes: B rows, T tokens (columns) and N action tokens of a batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from demo.tiny_model import silent_words_of, tiny_tokenizer
from flags import env_maker
from model import chunk_of
from record.command_line import UsageError
from record.model_checks import base_of_adapter, read_json
from sampler import PREFILL_TOKENS

GB = 10**9
SLACK = 0.04  # share of activations, working memory, log-probs and KV cache
CONTEXT = 0.7 * GB  # CUDA, cuBLAS and its workspaces
BLOCKS = 6.5  # (chunk, V) fp32 blocks that are alive at once in the backward pass of log-probs with entropy


@dataclass(frozen=True)
class Shape:
    """The sizes in a model's config.json that decide its memory.

    The model is a decoder with RMSNorm, gated MLP, grouped attention and rotary positions.
    """

    width: int  # D
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = True  # the output layer is the embedding
    head_width: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def queries(self) -> int:
        """Width of all queries of one token."""
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def keys(self) -> int:
        """Width of all keys of one token; its values have the same width."""
        return self.kv_heads * (self.head_width or self.width // self.heads)

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(in, out) of a layer's linear layers: q, k, v, o, gate, up, down."""
        d, a, k, f = self.width, self.queries, self.keys, self.mlp
        return [(d, a), (d, k), (d, k), (a, d), (d, f), (d, f), (f, d)]

    @property
    def backbone(self) -> int:
        """Number of parameters without a separate output layer."""
        layer = sum(i * o for i, o in self.linears) + 2 * self.width
        layer += (self.queries + 2 * self.keys) * self.qkv_bias
        layer += 2 * (self.head_width or self.width // self.heads) * self.qk_norm
        return self.vocab * self.width + self.layers * layer + self.width

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.backbone + (0 if self.tied else self.vocab * self.width)

    def adapter(self, rank: int) -> int:
        """Return the number of parameters of a LoRA adapter on all linear layers: rank (in + out) each."""
        return rank * self.layers * sum(i + o for i, o in self.linears)


def qwen(width, mlp, layers, heads, kv_heads, vocab=151936, tied=True) -> Shape:
    """Return the shape of a Qwen2 model."""
    return Shape(width, mlp, layers, heads, kv_heads, vocab, tied, qkv_bias=True)


KNOWN = {  # from the models' public config.json, for machines that have neither the file nor a network
    "Qwen/Qwen2.5-0.5B-Instruct": qwen(896, 4864, 24, 14, 2),
    "Qwen/Qwen2.5-1.5B-Instruct": qwen(1536, 8960, 28, 12, 2),
    "Qwen/Qwen2.5-3B-Instruct": qwen(2048, 11008, 36, 16, 2),
    "Qwen/Qwen2.5-7B-Instruct": qwen(3584, 18944, 28, 28, 4, 152064, tied=False),
    "meta-llama/Llama-3.2-1B-Instruct": Shape(2048, 8192, 16, 32, 8, 128256),
    "meta-llama/Llama-3.2-3B-Instruct": Shape(3072, 8192, 28, 24, 8, 128256),
}
FAMILIES = ("qwen2", "qwen3", "llama", "mistral")


def shape_of(model: str) -> Shape:
    """Return the shape of a model: a folder, a name in KNOWN, or a hub id.

    A folder with an adapter has the shape of the adapter's base. Raises ValueError if the shape cannot be
    found, or if the model belongs to none of FAMILIES.
    """
    try:
        return _shape_of_folder(Path(model)) or _shape_by_name(model)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its config.json does not describe a model ({error!r})") from None


def _shape_of_folder(folder: Path) -> Shape | None:
    if (folder / "adapter_config.json").is_file():
        return shape_of(base_of_adapter(folder))
    if (folder / "config.json").is_file():
        return read_config(read_json(folder / "config.json"), str(folder))
    return None


def _shape_by_name(model: str) -> Shape:
    if model in KNOWN:
        return KNOWN[model]
    from transformers import AutoConfig

    try:
        return read_config(AutoConfig.from_pretrained(model, trust_remote_code=False).to_dict(), model)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise ValueError(
            f"the shape of {model} is not known, and its config.json cannot be read ({reason}); "
            f"give a folder that holds this file, or one of {', '.join(KNOWN)}"
        ) from None


def read_config(config: dict, model: str) -> Shape:
    """Return the shape in a config.json. Raises ValueError for a family that the plan cannot count."""
    config = config.get("text_config") or config
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{model} has model type {family!r}, which --plan cannot count; it counts {', '.join(FAMILIES)}"
        )
    return Shape(
        width=config["hidden_size"],
        mlp=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        vocab=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        head_width=config.get("head_dim"),
        qkv_bias=family == "qwen2" or bool(config.get("attention_bias")),
        qk_norm=family == "qwen3",
    )


# --- bytes of one forward and backward pass -----------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """The number formats of a model."""

    rank: int  # of its adapters; 0: all weights are trained
    stored: int  # bytes of a weight; 4 if all weights are trained
    autocast: bool

    @property
    def computed(self) -> int:
        """Bytes of a number in the result of a matrix product."""
        return 2 if self.autocast else self.stored


def kept_bytes(shape: Shape, p: Precision) -> int:
    """Return the bytes that autograd keeps of one token in one layer."""
    d, a, k, f = shape.width, shape.queries, shape.keys, shape.mlp
    norms = 2 * 4 * d  # inputs of both norms, in fp32
    if p.rank == 0:
        norms += 2 * 4 * d  # normalised inputs, for the gradients of the norms' weights
    # Inputs of q k v, of o, of gate up, of down. If they are cast, each of the seven layers has its own copy
    shared, copies = 2 * d + a + f, 5 * d + a + f
    if p.rank == 0:
        inputs = 2 * (copies if p.autocast else 2 * shared)
    elif p.autocast:
        inputs = 2 * copies
    else:
        inputs = 4 * (shared if p.stored == 4 else copies)
    attention = p.computed * (a + 2 * k) + 4 * shape.heads
    if p.rank and (p.stored == 2 or p.autocast):
        attention += p.computed * a  # attention's result, beside the copy that o's adapter reads
    mlp = p.computed * 3 * f  # gate, silu(gate), up
    adapters = 7 * p.rank * (2 if p.autocast else 4)
    return norms + inputs + attention + mlp + adapters


def forward_bytes(shape: Shape, p: Precision) -> int:
    """Return the temporary bytes of one token in a forward pass without a graph, at the up projection."""
    d, f = shape.width, shape.mlp
    wide = 3 * p.computed
    if p.rank:  # silu(gate), the base's result, the adapter's result before and after scaling
        wide = 2 * p.computed + 2 * (2 if p.autocast else 4)
    return wide * f + 16 * d


def gradient_bytes(shape: Shape, p: Precision) -> int:
    """Return the bytes of one token's gradients that are alive at once in a layer's backward pass."""
    return (7 if p.computed == 4 else 8 if p.rank else 4) * shape.mlp + 12 * shape.width


def cast_bytes(shape: Shape, p: Precision) -> int:
    """Return the bytes of bf16 copies of fp32 weights, which autocast keeps as long as the graph."""
    base = shape.parameters if p.stored == 4 else 0
    return 2 * (base + (shape.adapter(p.rank) if p.rank else 0)) if p.autocast else 0


def backward_bytes(shape: Shape, p: Precision, tokens: int, checkpointing: bool) -> tuple[float, float]:
    """Return the bytes of (activations, working memory) of a decoder's forward and backward pass."""
    layer, result = kept_bytes(shape, p), p.stored * shape.width
    if p.rank == 0:
        result += 2 * 4 * shape.width  # of the last norm. With adapters, the first norm keeps nothing instead
    working = tokens * gradient_bytes(shape, p)
    if not checkpointing:
        return tokens * (shape.layers * layer + result) + cast_bytes(shape, p), working
    inputs = shape.layers * p.stored * shape.width
    return tokens * (inputs + layer + result) + cast_bytes(shape, p) / shape.layers, working


def log_prob_bytes(shape: Shape, p: Precision, actions: int) -> float:
    """Return the bytes of the log-probs of N action tokens and of their backward pass.

    These are the hidden states and their gradient, blocks of logits and, if the output layer is trained, two
    of its gradients: the gradient of one chunk beside the sum over the chunks before it.
    """
    chunk = min(actions, chunk_of(shape.vocab))
    blocks = BLOCKS * 4 * chunk * shape.vocab
    trained = 0 if p.rank else (2 * 4 + (2 if p.autocast else 0)) * shape.vocab * shape.width
    return 2 * p.stored * actions * shape.width + blocks + trained


def kv_bytes(shape: Shape, p: Precision) -> int:
    """Return the bytes of one token's keys and values in all layers.

    The rotation leaves keys in the wider of the formats of weights and of matrix products.
    """
    return shape.layers * shape.keys * (max(p.computed, p.stored) + p.computed)


# --- bytes of each moment of a run, by part -----------------------------------------------------------------

Parts = dict[str, float]  # bytes by part
Moments = dict[str, Parts]  # by moment


def precision(args) -> Precision:
    """Return the agents' number formats. Weights that are trained are stored in fp32."""
    stored = 4 if args.lora_rank == 0 or args.dtype == "float32" else 2
    return Precision(args.lora_rank, stored, bool(args.autocast))


def longest_row(args) -> int:
    """Return the tokens of the longest prompt with its reply."""
    return args.max_tokens


def agent_bytes(args, shape: Shape) -> Parts:
    """Estimate the memory that A, B and pi_prm hold during the whole run, with AdamW's moments."""
    p, policies = precision(args), 1 + args.explores
    critics = policies if args.algo == "ppo" else 0
    trained, head = shape.adapter(p.rank) if p.rank else shape.parameters, shape.width + 1
    return {
        "weights": p.stored * shape.parameters,  # of the shared base, or of the frozen reference
        "adapters" if p.rank else "trained copies": 4 * trained * policies,
        "optimizer": 8 * trained * policies,
        "critics and their optimizer": 12 * (trained + head) * critics,
        "implicit reward": 12 * trained * (args.dense_kind == "implicit"),  # weights and AdamW's moments
    }


def update_bytes(args, shape: Shape, tokens: int, actions: int) -> Parts:
    """Estimate the memory of an update.

    tokens, actions: padded tokens and action tokens of its largest micro-batch.
    """
    p, graphs = precision(args), 2 if args.algo == "ppo" else 1
    trained = shape.adapter(p.rank) if p.rank else shape.parameters
    activations, working = backward_bytes(shape, p, tokens, args.gradient_checkpointing)
    return agent_bytes(args, shape) | {
        "gradients": 4 * trained * graphs,
        "activations": activations * graphs,
        "working memory": working,
        "log-probs": log_prob_bytes(shape, p, actions),
    }


def rollout_bytes(args, shape: Shape) -> Parts:
    """Estimate the memory of one turn of all parallel episodes.

    Working memory is that of the prompts, of attention or of the draws, whichever is the largest.
    """
    if args.sampler == "vllm":
        return agent_bytes(args, shape)
    p, rows, full = precision(args), args.parallel_episodes, args.context == "full"
    # Rows share columns. In the full context, up to half of the columns are gaps before they are packed
    columns = args.max_prompt_tokens * (2 if full else 1) + args.max_new_tokens
    prompt_tokens = min(rows * args.max_prompt_tokens, max(PREFILL_TOKENS, args.max_prompt_tokens))
    prefill = forward_bytes(shape, p) * prompt_tokens
    # Keys and values of the rows that are read together, repeated for every head
    together = min(rows, 1 + PREFILL_TOKENS // args.max_new_tokens)
    repeated = together * 2 * columns * p.computed * shape.queries
    draw = 24 * shape.vocab  # fp32 logits, logits / temperature, log-probs; fp64 probabilities, sums
    return agent_bytes(args, shape) | {
        # When half of the rows have stopped, the other half is copied, and so on: at most twice the cache
        "KV cache": 2 * rows * columns * kv_bytes(shape, p),
        "working memory": max(prefill, repeated if full else 0, rows * draw) + cast_bytes(shape, p),
    }


def vllm_share(args) -> float:
    """Return the bytes of the GPU that vLLM's engine may use."""
    return args.vllm_memory * args.gpu_memory_gb * GB


def vllm_needs(args, shape: Shape) -> tuple[float, float]:
    """Return (bytes without the cache, bytes of the cache of one prompt and reply of the greatest length).

    Without the cache, the engine holds its copy of the base, room for two adapters, and a forward pass over
    8,192 tokens, which is vLLM's default.
    """
    p = precision(args)
    model = p.stored * (shape.parameters + 2 * shape.adapter(p.rank)) + 8192 * forward_bytes(shape, p)
    return model, longest_row(args) * 2 * shape.layers * shape.keys * p.stored


def vllm_episodes(args, shape: Shape) -> float:
    """Return how many prompts and replies of the greatest length the engine's cache holds at once.

    Further episodes wait. Below 1 the engine cannot work.
    """
    model, episode = vllm_needs(args, shape)
    return (vllm_share(args) - model) / episode


def reward_model_fit_bytes(args, backbone: Shape, resident: Parts) -> Parts:
    """Estimate the memory of the fit of the step reward model.

    All its weights are trained in fp32, one micro-batch at a time. resident: the parts of the agents and of
    the engine, which are in memory already.
    """
    p = Precision(0, 4, bool(args.autocast))
    tokens = max(args.tokens_per_micro_batch, longest_row(args))
    activations, working = backward_bytes(backbone, p, tokens, args.gradient_checkpointing)
    trained = backbone.backbone + backbone.width * (backbone.width + 2)
    return resident | {
        "step reward model": 4 * trained,
        "gradients": 4 * trained,
        "optimizer": 8 * trained,
        "activations": activations,
        "working memory": working,
    }


def warm_start_bytes(args, shape: Shape, tokens: int, actions: int) -> Parts:
    """Estimate the memory of the warm start, which trains all weights in fp32 before there are agents."""
    p = Precision(0, 4, bool(args.autocast))
    activations, working = backward_bytes(shape, p, tokens, args.gradient_checkpointing)
    return {
        "weights": 4 * shape.parameters,
        "gradients": 4 * shape.parameters,
        "optimizer": 8 * shape.parameters,
        "activations": activations,
        "working memory": working,
        "log-probs": log_prob_bytes(shape, p, actions),
    }


def with_slack(parts: Parts, context: float) -> Parts:
    """Return the parts that are not 0, and the slack. context: bytes of the GPU's libraries."""
    moving = ("activations", "working memory", "log-probs", "KV cache")
    slack = SLACK * sum(size for name, size in parts.items() if name in moving)
    return {name: size for name, size in parts.items() if size} | {"slack": slack + context}


def moments(args, shape: Shape, backbone: Shape | None, context: float = CONTEXT) -> Moments:
    """Estimate the memory of all moments that can be the run's largest.

    backbone: the step reward model's shape; None for a run without one.
    context: bytes of the GPU's libraries.
    """
    tokens = max(args.tokens_per_micro_batch, longest_row(args))
    actions = tokens  # the upper bound, since prompts can be short
    resident = {}
    if backbone:
        size = 2 if args.dtype == "bfloat16" else 4
        resident["step reward model"] = size * backbone.backbone + 4 * backbone.width * (backbone.width + 2)
    engine = {"vLLM and its cache": vllm_share(args)} if args.sampler == "vllm" else {}
    found = {
        "rollout": rollout_bytes(args, shape) | resident | engine,
        "update": update_bytes(args, shape, tokens, actions) | resident | engine,
    }
    if backbone and not args.reward_model:
        # The fit comes before B, which the first loop makes, and before AdamW has moments
        only_a = agent_bytes(dataclasses.replace(args, method="dense"), shape)
        before = {name: size for name, size in only_a.items() if "optimizer" not in name}
        if args.reward_model_source == "policy":  # the policy has played, so the engine has started
            before |= engine
        found["reward model fit"] = reward_model_fit_bytes(args, backbone, before)
    if args.warm_start:
        found["warm start"] = warm_start_bytes(args, shape, tokens, actions)
    return {name: with_slack(parts, context) for name, parts in found.items()}


def total(parts: Parts) -> float:
    """Return the bytes of all parts."""
    return sum(parts.values())


# --- refusal: the largest parts and their flags -------------------------------------------------------------

MODEL = "--model, --dtype"
BACKBONE = "--reward_model_backbone, --reward_model"  # the latter loads a fitted model
MICRO_BATCH = "--tokens_per_micro_batch, --gradient_checkpointing"
LEVERS = {  # the flags that decide a part's size
    "weights": MODEL,
    "adapters": "--lora_rank",
    "trained copies": "--lora_rank",
    "critics and their optimizer": "--algo, --lora_rank",
    "step reward model": BACKBONE,
    "implicit reward": "--dense_reward, --lora_rank",
    "optimizer": "--lora_rank",
    "gradients": "--lora_rank",
    "activations": MICRO_BATCH,
    "working memory": "--tokens_per_micro_batch",
    "log-probs": "--tokens_per_micro_batch",
    "KV cache": "--parallel_episodes",
    "vLLM and its cache": "--vllm_memory",
}
LEVERS_AT = {  # by moment, where they differ from LEVERS
    "rollout": {"working memory": "--parallel_episodes"},
    "reward model fit": {"optimizer": BACKBONE, "gradients": BACKBONE},
    "warm start": {"optimizer": MODEL, "gradients": MODEL},
}


def refusal(args, shape: Shape, backbone: Shape | None) -> str | None:
    """Explain in one line why the run cannot fit, with the flags to change; return None if it fits.

    For each moment that is too large, the line names its two largest parts.
    """
    if args.sampler == "vllm" and vllm_episodes(args, shape) < 1:
        return (
            f"--vllm_memory {args.vllm_memory}: {vllm_share(args) / GB:.1f} GB of the GPU must hold vLLM's "
            f"copy of the model and the cache of one episode, {sum(vllm_needs(args, shape)) / GB:.1f} GB; "
            "raise it or take a larger GPU"
        )
    reasons = []
    for moment, parts in moments(args, shape, backbone).items():
        if total(parts) > args.gpu_memory_gb * GB:
            levers = LEVERS | LEVERS_AT.get(moment, {})
            largest = sorted((part for part in levers if part in parts), key=parts.get, reverse=True)[:2]
            sizes = [f"{part} {parts[part] / GB:.1f} ({levers[part]})" for part in largest]
            reasons.append(f"the {moment} needs {total(parts) / GB:.1f} GB, mostly {' and '.join(sizes)}")
    if not reasons:
        return None
    way = "change a flag in parentheses or take a larger GPU"
    return f"--gpu_memory_gb {args.gpu_memory_gb:g}: {'; '.join(reasons)}; {way}"


# --- as text ------------------------------------------------------------------------------------------------


def loop_size(args) -> dict[str, int]:
    """Return upper bounds for one loop of Algorithm 1: k updates of B, its buffer, k updates of A."""
    update_episodes = args.on_policy_tasks * args.episodes_per_task
    updates = args.k * (2 if args.explores else 1)
    buffer = args.buffer_groups * args.episodes_per_task if "collect" in args.buffer_sources else 0
    played = updates * update_episodes + buffer
    replayed = args.k * args.off_policy_episodes
    imitated = args.k * args.spear_buffer if args.method == "spear" else 0
    turns = played * args.max_turns
    return {
        "loops": args.total_updates // args.k,
        "updates": updates,
        "episodes": played,
        "replayed episodes": replayed,
        "turns": turns,
        "sampled tokens": turns * args.max_new_tokens,
        "prompt tokens": turns * args.max_prompt_tokens,
        "trained turns": (played - buffer + replayed) * args.max_turns + imitated,
    }


def memory_table(found: Moments, gpu_memory_gb: float) -> list[str]:
    """Return the lines of the table: a column for each moment, a line for each part in LEVERS' order."""

    def line(name: str, cells: list[str]) -> str:
        return f"{name:<34}" + "".join(f"{cell:>18}" for cell in cells)

    lines = [line("largest memory of one GPU in GB", list(found))]
    for part in [*LEVERS, "slack"]:
        sizes = [parts.get(part, 0) for parts in found.values()]
        if any(sizes):
            lines.append(line(part, [f"{size / GB:.2f}" if size else "-" for size in sizes]))
    sums = [f"{total(parts) / GB:.2f}" for parts in found.values()]
    lines.append(line(f"total, of {gpu_memory_gb:g}", sums))
    return lines


def text(args, shape: Shape, backbone: Shape | None) -> str:
    """Return the text that --plan prints: the model's size, memory by moment and part, the size of a loop."""
    heading = f"{args.model}: {shape.parameters:,} parameters"
    if args.lora_rank:
        heading += f"; adapter of rank {args.lora_rank}: {shape.adapter(args.lora_rank):,}"
    if backbone:
        heading += f"; step reward model: {backbone.backbone:,}"
    p = precision(args)
    if args.sampler == "vllm":
        episodes = max(vllm_episodes(args, shape), 0)
        cache = f"vLLM's cache: {episodes:.0f} episodes of the greatest length at a time"
    else:
        cache = f"KV cache: {kv_bytes(shape, p):,} bytes a token, {args.parallel_episodes} episodes at a time"
    tokens = max(args.tokens_per_micro_batch, longest_row(args))
    graphs = 2 if args.algo == "ppo" else 1
    with_it, without = (graphs * backward_bytes(shape, p, tokens, on)[0] / GB for on in (True, False))
    loop = loop_size(args)
    lines = [
        heading,
        "",
        *memory_table(moments(args, shape, backbone), args.gpu_memory_gb),
        "",
        f"activations of a micro-batch of {tokens:,} tokens: {with_it:.2f} GB with --gradient_checkpointing, "
        f"{without:.2f} GB without",
        cache,
        "",
        f"each of {loop['loops']} loops, at most:",
        f"  {loop['updates']} updates, {loop['trained turns']:,} turns trained on",
        f"  {loop['episodes']:,} episodes played, {loop['replayed episodes']:,} replayed",
        f"  {loop['turns']:,} turns, {loop['prompt tokens']:,} prompt tokens, "
        f"{loop['sampled tokens']:,} sampled tokens",
    ]
    return "\n".join(lines)


def plan_of(args) -> tuple[str, str | None]:
    """Return the plan of a run as text, and the reason if the run does not fit into the GPU's memory.

    Raises UsageError if the shape of a model is not known.
    """
    if args.model == "tiny":
        env, heads = env_maker(args)(), args.tiny_heads
        words = len(tiny_tokenizer(env.vocabulary, silent_words_of(env)))
        model = qwen(args.tiny_width, 2 * args.tiny_width, args.tiny_layers, heads, heads, words)
    else:
        model = shape_of_flag(args, "model")
    backbone = None
    if args.dense_kind == "step_model":
        flag = "reward_model" if args.reward_model else "reward_model_backbone"
        backbone = shape_of_flag(args, flag) if getattr(args, flag) else model
    if not args.gpu_memory_gb:
        gpu = torch.cuda.is_available()
        size = torch.cuda.get_device_properties(0).total_memory / GB if gpu else 80
        args = dataclasses.replace(args, gpu_memory_gb=size)
    return text(args, model, backbone), refusal(args, model, backbone)


def shape_of_flag(args, name: str) -> Shape:
    """Return the shape of the model that a flag names. Raises UsageError."""
    try:
        return shape_of(getattr(args, name))
    except ValueError as error:
        raise UsageError(f"--{name} {getattr(args, name)}: {error}") from None
