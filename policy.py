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

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from batch import Batch
from chat import Chat
from model import Base, put


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
