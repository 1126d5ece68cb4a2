"""`python train.py --plan`: the memory that a run will take, by part, and the episodes of one of its loops.

Arithmetic on a model's config alone: nothing is loaded. The numbers are upper bounds from the flags: every
prompt and reply is as long as it may be, and every micro-batch full. GB are 10^9 bytes.

Memory is added up for the moments that can be a run's largest: `rollout` (a turn of --parallel_episodes),
`update` (the backward pass of a micro-batch), and, where they are part of the run, `reward model fit` and
`warm start`. In an update it is
    what stays          weights, adapters or copies, AdamW's two moments, gradients, each of every agent
    activations         what autograd keeps of a micro-batch, tensor by tensor as transformers, peft and
                        torch's fused attention do; with gradient checkpointing the inputs of all layers, and
                        all of one layer. PPO's critic shares the backward pass, so twice that
    working memory      the gradients in flight in one layer (or the temporaries of a forward pass)
    log-probs           hidden states of the action tokens and policy.CHUNK_LOGITS of logits, several times
    slack               SLACK of all that comes and goes, for allocators that cannot use every gap, and on a
                        GPU CONTEXT for its libraries
With --sampler vllm the engine's share of the GPU takes the place of the rollout's own parts, and stays there.
Measured on a CPU (tests/test_plan.py), the sum of an update lies within 15 % of the peak. Not in it is what
glibc's heap keeps of freed tensors: without MALLOC_MMAP_THRESHOLD_=65536, up to the activations once more.

Left out: attention that is not fused (it would keep a (B, heads, T, T) block), quantised weights, experts,
sharding over GPUs, and the environments, which live in the CPU's memory.

Shapes: B rows, T tokens (columns), N action tokens of a batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model import chunk_of
from sampler import PREFILL_TOKENS

GB = 10**9
SLACK = 0.04  # of activations, working memory, log-probs and KV cache
CONTEXT = 0.7 * GB  # CUDA, cuBLAS and its workspaces
BLOCKS = 6.5  # blocks of (chunk, V) fp32 that log-probs with entropy hold at a time in their backward pass


@dataclass(frozen=True)
class Shape:
    """What of a model's config.json decides its memory: RMSNorm, gated MLP, grouped attention, rotary."""

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
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def keys(self) -> int:
        return self.kv_heads * (self.head_width or self.width // self.heads)

    @property
    def linears(self) -> list[tuple[int, int]]:
        """(in, out) of a layer's linear layers: q, k, v, o, gate, up, down."""
        d, a, k, f = self.width, self.queries, self.keys, self.mlp
        return [(d, a), (d, k), (d, k), (a, d), (d, f), (d, f), (f, d)]

    @property
    def backbone(self) -> int:
        """Parameters without an output layer of its own."""
        layer = sum(i * o for i, o in self.linears) + 2 * self.width
        layer += (self.queries + 2 * self.keys) * self.qkv_bias
        layer += 2 * (self.head_width or self.width // self.heads) * self.qk_norm
        return self.vocab * self.width + self.layers * layer + self.width

    @property
    def parameters(self) -> int:
        return self.backbone + (0 if self.tied else self.vocab * self.width)

    def adapter(self, rank: int) -> int:
        """Parameters of a LoRA adapter on all linear layers: rank (in + out) each."""
        return rank * self.layers * sum(i + o for i, o in self.linears)


def qwen(width, mlp, layers, heads, kv_heads, vocab=151936, tied=True) -> Shape:
    return Shape(width, mlp, layers, heads, kv_heads, vocab, tied, qkv_bias=True)


KNOWN = {  # from the models' public config.json, for where they are not at hand
    "Qwen/Qwen2.5-0.5B-Instruct": qwen(896, 4864, 24, 14, 2),
    "Qwen/Qwen2.5-1.5B-Instruct": qwen(1536, 8960, 28, 12, 2),
    "Qwen/Qwen2.5-3B-Instruct": qwen(2048, 11008, 36, 16, 2),
    "Qwen/Qwen2.5-7B-Instruct": qwen(3584, 18944, 28, 28, 4, 152064, tied=False),
    "meta-llama/Llama-3.2-1B-Instruct": Shape(2048, 8192, 16, 32, 8, 128256),
    "meta-llama/Llama-3.2-3B-Instruct": Shape(3072, 8192, 28, 24, 8, 128256),
    "HuggingFaceTB/SmolLM2-135M-Instruct": Shape(576, 1536, 30, 9, 3, 49152),
    "HuggingFaceTB/SmolLM2-360M-Instruct": Shape(960, 2560, 32, 15, 5, 49152),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": Shape(2048, 8192, 24, 32, 32, 49152),
}
FAMILIES = ("qwen2", "qwen3", "llama", "mistral")


def shape_of(model: str) -> Shape:
    """Of a folder (an adapter's: of its base), of a hub id in the local cache or on the hub, or as KNOWN.

    Raises ValueError for a model whose shape cannot be found out, or is of another family.
    """
    try:
        return _shape_of_folder(Path(model)) or _shape_by_name(model)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its configuration is none of a model ({error!r})") from None


def _shape_of_folder(folder: Path) -> Shape | None:
    if (folder / "adapter_config.json").is_file():
        return shape_of(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"])
    if (folder / "config.json").is_file():
        return _read(json.loads((folder / "config.json").read_text()), str(folder))
    return None


def _shape_by_name(model: str) -> Shape:
    if model in KNOWN:
        return KNOWN[model]
    from transformers import AutoConfig

    try:
        return _read(AutoConfig.from_pretrained(model).to_dict(), model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the shape of {model} is not known, and its config.json cannot be read "
            f"({' '.join(str(error).split())[:120]}); give a folder that holds it, or one of "
            f"{', '.join(KNOWN)}"
        ) from None


def _read(config: dict, model: str) -> Shape:
    config = config.get("text_config") or config
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{model} is of model type {family!r}: --plan can count {', '.join(FAMILIES)} models alone"
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


# --- bytes of one token -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """How a model computes. stored: bytes of a weight (trained whole: 4). rank: of its adapters, 0: whole."""

    rank: int
    stored: int
    autocast: bool

    @property
    def computed(self) -> int:
        """Bytes of what a matrix product gives."""
        return 2 if self.autocast else self.stored


def kept(shape: Shape, p: Precision) -> int:
    """What autograd keeps of one token in one layer, in bytes."""
    d, a, k, f = shape.width, shape.queries, shape.keys, shape.mlp
    norms = 2 * 4 * d  # their inputs, in fp32
    if p.rank == 0:
        norms += 2 * 4 * d  # and their results before the weight, for its gradient
    # The inputs of q k v, o, gate up, down. Whoever casts them has a copy for each of the seven
    shared, copies = 2 * d + a + f, 5 * d + a + f
    if p.rank == 0:
        inputs = 2 * (copies if p.autocast else 2 * shared)
    elif p.autocast:
        inputs = 2 * copies
    else:
        inputs = 4 * (shared if p.stored == 4 else copies)
    attention = p.computed * (a + 2 * k) + 4 * shape.heads
    if p.rank and (p.stored == 2 or p.autocast):
        attention += p.computed * a  # its result, beside the copy that o's adapter reads
    inside = p.computed * 3 * f  # gate, silu(gate), up
    adapters = 7 * p.rank * (2 if p.autocast else 4)
    return norms + inputs + attention + inside + adapters


def passing(shape: Shape, p: Precision) -> int:
    """The temporaries of one token in a forward pass that keeps nothing, in bytes: at the up projection."""
    d, f = shape.width, shape.mlp
    wide = 3 * p.computed
    if p.rank:  # silu(gate), the base's result, the adapter's, and that once more, scaled
        wide = 2 * p.computed + 2 * (2 if p.autocast else 4)
    return wide * f + 16 * d


def in_flight(shape: Shape, p: Precision) -> int:
    """The gradients of one token that are alive at once in a layer's backward pass, in bytes."""
    return (7 if p.computed == 4 else 8 if p.rank else 4) * shape.mlp + 12 * shape.width


def casts(shape: Shape, p: Precision) -> int:
    """Weights in fp32, trained or under what is trained, that autocast keeps in bf16 while a graph lives."""
    base = shape.parameters if p.stored == 4 else 0
    return 2 * (base + (shape.adapter(p.rank) if p.rank else 0)) if p.autocast else 0


def backward(shape: Shape, p: Precision, tokens: int, checkpointing: bool) -> tuple[float, float]:
    """Activations and working memory of a decoder's forward and backward pass over so many tokens."""
    layer, top = kept(shape, p), p.stored * shape.width  # top: the result
    if p.rank == 0:
        top += 2 * 4 * shape.width  # and in the last norm. Of an adapted model the first norm keeps nothing
    working = tokens * in_flight(shape, p)
    if not checkpointing:
        return tokens * (shape.layers * layer + top) + casts(shape, p), working
    inputs = shape.layers * p.stored * shape.width
    return tokens * (inputs + layer + top) + casts(shape, p) / shape.layers, working


def log_probs(shape: Shape, p: Precision, actions: int) -> float:
    """Hidden states of the action tokens and their gradient, blocks of logits, gradients of the output layer
    if it is trained: each chunk's beside the sum of those before."""
    chunk = min(actions, chunk_of(shape.vocab))
    blocks = BLOCKS * 4 * chunk * shape.vocab
    trained = 0 if p.rank else (2 * 4 + (2 if p.autocast else 0)) * shape.vocab * shape.width
    return 2 * p.stored * actions * shape.width + blocks + trained


def kv_token(shape: Shape, p: Precision) -> int:
    """Keys and values of one token in all layers. Rotated keys are as wide as what the rotation came in."""
    return shape.layers * shape.keys * (max(p.computed, p.stored) + p.computed)


# --- the moments of a run -----------------------------------------------------------------------------------


def precision(args) -> Precision:
    """Of the agents. Full weights are trained, and so kept, in fp32."""
    stored = 4 if args.lora_rank == 0 or args.dtype == "float32" else 2
    return Precision(args.lora_rank, stored, bool(args.autocast))


def agents(args, shape: Shape) -> dict[str, float]:
    """What stays on the device as long as the agents do: of one base or of copies, with AdamW's moments."""
    p, policies = precision(args), 1 + args.explores
    critics = policies if args.algo == "ppo" else 0
    trained, head = shape.adapter(p.rank) if p.rank else shape.parameters, shape.width + 1
    return {
        # the base; of full weights the frozen reference
        "weights": p.stored * shape.parameters,
        "adapters" if p.rank else "trained copies": 4 * trained * policies,
        "optimizer": 8 * trained * policies,
        "critics and their optimizer": 12 * (trained + head) * critics,
    }


def update(args, shape: Shape, tokens: int, actions: int) -> dict[str, float]:
    """The parts of an update whose largest micro-batch has so many padded tokens and action tokens."""
    p, graphs = precision(args), 2 if args.algo == "ppo" else 1
    trained = shape.adapter(p.rank) if p.rank else shape.parameters
    activations, working = backward(shape, p, tokens, args.gradient_checkpointing)
    return {
        **agents(args, shape),
        "gradients": 4 * trained * graphs,
        "activations": activations * graphs,
        "working memory": working,
        "log-probs": log_probs(shape, p, actions),
    }


def rollout(args, shape: Shape) -> dict[str, float]:
    """A turn of all parallel episodes: their cache, and the most that prompts, attention or draws need."""
    if args.sampler == "vllm":
        return agents(args, shape)
    p, rows, full = precision(args), args.parallel_episodes, args.context == "full"
    # Rows share columns. In a chat that goes on, holes may take up to half of them before they are packed
    columns = args.max_prompt_tokens * (2 if full else 1) + args.max_new_tokens
    prompts = min(rows * args.max_prompt_tokens, max(PREFILL_TOKENS, args.max_prompt_tokens))
    prefill = passing(shape, p) * prompts
    # Keys and values, repeated for every head, of rows that are read at once: as many as have such replies
    again = min(rows, 1 + PREFILL_TOKENS // args.max_new_tokens) * 2 * columns * p.computed * shape.queries
    draw = 24 * shape.vocab  # logits, the same by temperature, log-probs in fp32; probabilities, sums in fp64
    return {
        **agents(args, shape),
        # rows that still decode when half have stopped are copied, then half of those, ...: twice at most
        "KV cache": 2 * rows * columns * kv_token(shape, p),
        "working memory": max(prefill, again if full else 0, rows * draw) + casts(shape, p),
    }


def vllm_share(args) -> float:
    return args.vllm_memory * args.gpu_memory_gb * GB


def vllm_episodes(args, shape: Shape) -> float:
    """Prompts and replies of the greatest length that its cache holds at once, beside the engine's base, room
    for two adapters, and a forward pass over its usual 8,192 tokens. Others wait; below 1 it cannot work."""
    p = precision(args)
    held = p.stored * (shape.parameters + 2 * shape.adapter(p.rank)) + 8192 * passing(shape, p)
    return (vllm_share(args) - held) / (longest_row(args) * 2 * shape.layers * shape.keys * p.stored)


def reward_model_fit(args, backbone: Shape, resident: dict[str, float]) -> dict[str, float]:
    """All weights in fp32, one micro-batch of tokens in the graph at a time. The agents are there already,
    with nothing to remember yet."""
    p = Precision(0, 4, bool(args.autocast))
    tokens = max(args.tokens_per_micro_batch, longest_row(args))
    activations, working = backward(backbone, p, tokens, args.gradient_checkpointing)
    trained = backbone.backbone + backbone.width * (backbone.width + 2)
    return {
        **resident,
        "step reward model": 4 * trained,
        "gradients": 4 * trained,
        "optimizer": 8 * trained,
        "activations": activations,
        "working memory": working,
    }


def warm_start(args, shape: Shape, tokens: int, actions: int) -> dict[str, float]:
    p = Precision(0, 4, bool(args.autocast))
    activations, working = backward(shape, p, tokens, args.gradient_checkpointing)
    return {
        "weights": 4 * shape.parameters,
        "gradients": 4 * shape.parameters,
        "optimizer": 8 * shape.parameters,
        "activations": activations,
        "working memory": working,
        "log-probs": log_probs(shape, p, actions),
    }


def longest_row(args) -> int:
    return args.max_prompt_tokens + args.max_new_tokens


def _with_slack(parts: dict[str, float], context: float) -> dict[str, float]:
    moving = ("activations", "working memory", "log-probs", "KV cache")
    slack = SLACK * sum(size for name, size in parts.items() if name in moving)
    return {**{name: size for name, size in parts.items() if size}, "slack": slack + context}


Moments = dict[str, dict[str, float]]  # bytes by moment and part


def moments(args, shape: Shape, backbone: Shape | None, context: float = CONTEXT) -> Moments:
    """backbone: the step reward model's, None for a run without one."""
    tokens = max(args.tokens_per_micro_batch, longest_row(args))
    actions = tokens  # there are short prompts, too
    loaded = {}
    engine = {"vLLM and its cache": vllm_share(args)} if args.sampler == "vllm" else {}
    if backbone:
        size = 2 if args.dtype == "bfloat16" else 4
        loaded = {"step reward model": size * backbone.backbone + 4 * backbone.width * (backbone.width + 2)}
    found = {
        "rollout": {**rollout(args, shape), **loaded, **engine},
        "update": {**update(args, shape, tokens, actions), **loaded, **engine},
    }
    if backbone and not args.reward_model:
        alone = dataclasses.replace(args, method="dense")  # B and AdamW's moments come with the first loop
        before = {name: size for name, size in agents(alone, shape).items() if "optimizer" not in name}
        if args.reward_model_source == "policy":  # the engine has played its games by then
            before |= engine
        found["reward model fit"] = reward_model_fit(args, backbone, before)
    if args.warm_start:
        found["warm start"] = warm_start(args, shape, tokens, actions)
    return {name: _with_slack(parts, context) for name, parts in found.items()}


def loop(args) -> dict[str, int]:
    """Upper bounds of one loop of Algorithm 1: k updates of B, its buffer, k updates of A."""
    update_episodes = args.on_policy_tasks * args.episodes_per_task
    updates = args.k * (2 if args.explores else 1)
    buffer = args.buffer_groups * args.episodes_per_task if args.explores else 0
    played = updates * update_episodes + buffer
    replayed = args.k * args.off_policy_episodes
    turns = played * args.max_turns
    return {
        "loops": args.total_updates // args.k,
        "updates": updates,
        "episodes": played,
        "replayed episodes": replayed,
        "turns": turns,
        "sampled tokens": turns * args.max_new_tokens,
        "prompt tokens": turns * args.max_prompt_tokens,
        "trained turns": (played - buffer + replayed) * args.max_turns,
    }


# --- what cannot be -----------------------------------------------------------------------------------------


def total(parts: dict[str, float]) -> float:
    return sum(parts.values())


def remedy(args, shape: Shape, backbone: Shape | None) -> dict[str, object] | None:
    """The flags, lowered as little as needed, with which every moment fits; None if they cannot do it."""
    changed: dict[str, object] = {}
    capacity = args.gpu_memory_gb * GB
    for moment in moments(args, shape, backbone):

        def fits(trial, moment=moment) -> bool:
            return total(moments(trial, shape, backbone).get(moment, {})) <= capacity

        options = [(flag, value) for flag, values in knobs(args, shape, moment) for value in values]
        alone = [option for option in options if fits(dataclasses.replace(args, **dict([option])))]
        steps = [*alone[:1], *options]  # one flag if one does it, else one on top of the other
        for flag, value in steps:
            if fits(args):
                break
            args = dataclasses.replace(args, **{flag: value})
            changed[flag] = value
        if not fits(args):
            return None
    return changed


def knobs(args, shape: Shape, moment: str) -> Iterator[tuple[str, list]]:
    """What makes a moment smaller, the harmless first: flags and ever lower values of them."""
    if moment == "rollout" and args.sampler == "kv":
        yield "parallel_episodes", list(_halves(args.parallel_episodes, 1))
    if moment != "rollout":
        if not args.gradient_checkpointing:
            yield "gradient_checkpointing", [True]
        yield "tokens_per_micro_batch", list(_halves(args.tokens_per_micro_batch, longest_row(args)))
    if args.sampler == "vllm" and moment != "warm start":
        yield "vllm_memory", [share for share in vllm_shares(args, shape) if share < args.vllm_memory][::-1]
    if moment in ("rollout", "update") and args.lora_rank == 0:
        yield "lora_rank", [64]


def vllm_shares(args, shape: Shape) -> list[float]:
    """Values of --vllm_memory with which the engine works, the least first."""
    shares = [percent / 100 for percent in range(5, 100, 5)]
    return [one for one in shares if vllm_episodes(dataclasses.replace(args, vllm_memory=one), shape) >= 1]


def _halves(value: int, lowest: int) -> Iterator[int]:
    while value > lowest:
        value = max(value // 2, lowest)
        yield value


def refusal(args, shape: Shape, backbone: Shape | None) -> str | None:
    """Why it cannot fit, and which flag to lower, in one line; None if it fits."""
    if args.sampler == "vllm" and vllm_episodes(args, shape) < 1:
        share = f"--vllm_memory {args.vllm_memory}: {vllm_share(args) / GB:.1f} GB"
        why = f"{share} hold no copy of the model with the cache of an episode; "
        if not (enough := vllm_shares(args, shape)):
            return why + "take a larger GPU"
        rest = refusal(dataclasses.replace(args, vllm_memory=enough[0]), shape, backbone)
        return f"{why}give {enough[0]}" + (f"; then {rest}" if rest else "")
    sizes = {moment: total(parts) / GB for moment, parts in moments(args, shape, backbone).items()}
    over = [f"the {name} needs {size:.1f} GB" for name, size in sizes.items() if size > args.gpu_memory_gb]
    if not over:
        return None
    changed = remedy(args, shape, backbone)
    if changed is None:
        way = "its memory flags cannot do it; take a larger GPU, --dtype bfloat16, a smaller --model or "
        way += "--reward_model_backbone, or a --reward_model that was fitted elsewhere"
    else:
        words = (f"--{flag}" + ("" if value is True else f" {value}") for flag, value in changed.items())
        way = f"it fits with {' '.join(words)}"
    return f"--gpu_memory_gb {args.gpu_memory_gb:g}: {', '.join(over)}; {way}"


# --- as text ------------------------------------------------------------------------------------------------


PARTS = (  # in the order of their lines
    *("weights", "adapters", "trained copies", "critics and their optimizer", "step reward model"),
    *("optimizer", "gradients", "activations", "working memory", "log-probs", "KV cache"),
    *("vLLM and its cache", "slack"),
)


def text(args, shape: Shape, backbone: Shape | None) -> str:
    """The tables that --plan prints."""
    found = moments(args, shape, backbone)
    about = f"{args.model}: {shape.parameters:,} parameters"
    if args.lora_rank:
        about += f", an adapter of rank {args.lora_rank} {shape.adapter(args.lora_rank):,}"
    if backbone:
        about += f"; step reward model {backbone.backbone:,}"

    def line(name: str, cells: list[str]) -> str:
        return f"{name:<34}" + "".join(f"{cell:>18}" for cell in cells)

    lines = [about, "", line("memory of one GPU at most, in GB", list(found))]
    for part in PARTS:
        sizes = [parts.get(part, 0) for parts in found.values()]
        if any(sizes):
            lines.append(line(part, [f"{size / GB:.2f}" if size else "-" for size in sizes]))
    sums = [f"{total(parts) / GB:.2f}" for parts in found.values()]
    lines.append(line(f"total, of {args.gpu_memory_gb:g}", sums))

    tokens, p = max(args.tokens_per_micro_batch, longest_row(args)), precision(args)
    graphs = 2 if args.algo == "ppo" else 1
    kept_on, kept_off = (graphs * backward(shape, p, tokens, on)[0] / GB for on in (True, False))
    one = loop(args)
    if args.sampler == "vllm":
        count = max(vllm_episodes(args, shape), 0)
        cache = f"vLLM's cache holds {count:.0f} episodes of the greatest length at a time"
    else:
        cache = f"KV cache: {kv_token(shape, p):,} bytes a token, {args.parallel_episodes} episodes at a time"
    return "\n".join(
        [
            *lines,
            "",
            f"activations of a micro-batch of {tokens:,} tokens: {kept_on:.2f} GB with "
            f"--gradient_checkpointing, {kept_off:.2f} GB without",
            cache,
            "",
            f"each of {one['loops']} loops, at most: {one['updates']} updates, {one['episodes']:,} episodes "
            f"played and {one['replayed episodes']:,} replayed,",
            f"{one['turns']:,} turns, {one['prompt tokens']:,} tokens of prompts and "
            f"{one['sampled tokens']:,} sampled; {one['trained turns']:,} turns trained on",
        ]
    )
