"""The agents: the trainable weights of A and B, their AdamW, and PPO's critics.

A (`Policy` "policy") and B (its `fork` "explorer") share one frozen `Base`. With LoRA each of them is an
adapter, a critic is an adapter with a linear head, and the reference is the base without adapters. With
`lora_rank=0` each of them is a whole copy, and the reference is a frozen copy. Every agent has its own AdamW,
so training one agent changes no weight or optimizer state of another.

The order is `base = load_base(...)`, then `warm_start(base, ...)` if the model cannot act yet, then
`Policy(base, ...)`. The reference is the base at the moment when the first Policy is made.

Shapes: B rows, T tokens (columns), D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from batch import Batch
from model import Base, scatter_tokens
from record.model_checks import check_shapes


@dataclass(frozen=True)
class AgentSettings:
    """Settings of a policy, shared by its forks and critics."""

    lora_rank: int = 0  # 0: train full weights
    lora_alpha: float = 64.0
    learning_rate: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)  # of AdamW
    weight_decay: float = 0.01  # of AdamW
    critic_learning_rate: float | None = None  # None: no critic
    temperature: float = 1.0  # of training: used for sampling and for log-probs
    seed: int = 0  # of the initial LoRA weights


class Agent:
    """Trainable weights, an adapter on the base or a whole copy, and the AdamW that updates them.

    `version` changes whenever the weights do.
    """

    def __init__(
        self, base: Base, name: str, settings: AgentSettings, learning_rate: float, head: nn.Module | None
    ):
        """head: further weights to train, beside those that `Base.attach` makes."""
        self.base, self.name, self.version = base, name, 0
        self.device, self.chat, self.max_length = base.device, base.chat, base.max_length
        self.model, self.named = base.attach(name, settings.lora_rank, settings.lora_alpha, settings.seed)
        if head is not None:
            self.named |= {f"head.{key}": p for key, p in head.named_parameters()}
        self.parameters = list(self.named.values())
        assert self.parameters and all(p.dtype == torch.float32 for p in self.parameters)
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def activate(self) -> nn.Module:
        """Put this agent's weights in use. Returns the causal LM, in eval mode."""
        self.base.use(self.name)
        return self.model

    def _reactivate_in_backward(self, values: Tensor) -> Tensor:
        """Make backward reactivate this agent before it differentiates `values`.

        If another agent is active when backward runs, this agent's parameters are frozen and autograd skips
        them silently.
        """

        def reactivate(gradient: Tensor) -> None:
            self.activate()

        if values.requires_grad:
            values.register_hook(reactivate)
        return values

    def step(self, max_grad_norm: float) -> float:
        """Clip the gradient, step AdamW and drop the gradient. Returns the gradient's norm before clipping.

        Raises RuntimeError if there is no gradient, FloatingPointError if its norm is not finite.
        """
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
        """Copy the other agent's weights and AdamW state by value."""
        torch._foreach_copy_(self.parameters, other.parameters)
        self.optimizer.state.clear()
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            if theirs in other.optimizer.state:
                state = other.optimizer.state[theirs]
                self.optimizer.state[mine] = {key: value.clone() for key, value in state.items()}
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Return CPU copies of the weights and the AdamW state: `weight/<name>`, `exp_avg/<name>`, ..."""
        state = {}
        for name, p in self.named.items():
            state[f"weight/{name}"] = p
            for key, value in self.optimizer.state.get(p, {}).items():
                state[f"{key}/{name}"] = value
        return {key: value.detach().to("cpu", copy=True) for key, value in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned. Raises ValueError if a name or a shape is another.

        The parameters stay the same tensors; only their values change.
        """
        expected = {f"weight/{name}": p for name, p in self.named.items()}
        stepped = [name for name in self.named if f"step/{name}" in state]  # AdamW has a state of these
        for name in stepped:
            expected[f"step/{name}"] = torch.zeros(())
            expected[f"exp_avg/{name}"] = expected[f"exp_avg_sq/{name}"] = self.named[name]
        check_shapes(f"the saved weights of agent {self.name!r}", expected, state)
        self.optimizer.state.clear()
        for name, p in self.named.items():
            p.copy_(state[f"weight/{name}"])
        for name in stepped:
            p = self.named[name]
            loaded = {key: state[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            self.optimizer.state[p] = {key: value.to(p.device, copy=True) for key, value in loaded.items()}
        self.version += 1


class Policy(Agent):
    """An agent that acts: A, or B made by `fork`.

    With a `critic_learning_rate` it also has a `critic` (PPO).
    """

    def __init__(self, base: Base, name: str = "policy", **settings):
        """settings: fields of `AgentSettings`."""
        self.settings = AgentSettings(**settings)
        super().__init__(base, name, self.settings, self.settings.learning_rate, head=None)
        self.temperature = self.settings.temperature
        self.critic = None
        if self.settings.critic_learning_rate is not None:
            self.critic = Critic(base, f"{name}_critic", self.settings)
        self._explorer: Policy | None = None  # the last fork; its tensors are reused
        self._discarded = False

    def activate(self) -> nn.Module:
        """Put this agent's weights in use. Raises RuntimeError if it was discarded."""
        if self._discarded:
            raise RuntimeError(f"agent {self.name!r} was discarded: fork a new one")
        return super().activate()

    def hidden(self, input_ids: Tensor, mask=None, positions=None, cache=None) -> Tensor:
        """Return this agent's last hidden states (B, T, D), for samplers. Arguments as in `Base.hidden`."""
        return self.base.hidden(self.activate(), input_ids, mask, positions, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of this agent's hidden states (..., D), in fp32."""
        return self.base.logits(self.model, hidden)

    def logprobs(self, batch: Batch, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return log pi(token | tokens before it) and, if wanted, the entropy of pi there.

        Both are (B, T) and fp32, at the training temperature, and 0 outside the action columns. Gradients
        flow to this agent only.
        """
        scores = self.base.score(self.activate(), batch, self.temperature, with_entropy)
        scores = [self._reactivate_in_backward(values) for values in scores]
        return scores[0], scores[1] if with_entropy else None

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Return the starting model's log-probs (B, T), at the training temperature."""
        self.base.use(None)
        model = self.base.model if self.base.reference is None else self.base.reference
        return self.base.score(model, batch, self.temperature)[0]

    def fork(self, name: str) -> Policy:
        """Return B: a copy of this agent's weights and AdamW state.

        Every fork reuses the tensors of the last fork, overwritten by A's values. B's critic is not a copy of
        A's: it keeps what it learned from fork to fork.
        """
        if self._explorer is None:
            self._explorer = Policy(self.base, name, **vars(self.settings))
        self._explorer._discarded = False
        self._explorer.copy_from(self)
        return self._explorer

    def discard(self) -> None:
        """Mark this agent as unusable. Its tensors are kept for the next fork."""
        self._discarded = True

    def state_dicts(self) -> dict[str, dict[str, Tensor]]:
        """Return all that a resumed run needs: "policy", and for PPO "critic" and "explorer_critic"."""
        states = {"policy": self.state_dict()}
        if self.critic is not None:
            states["critic"] = self.critic.state_dict()
            if self._explorer is not None:
                states["explorer_critic"] = self._explorer.critic.state_dict()
        return states

    def load_state_dicts(self, states: dict[str, dict[str, Tensor]]) -> None:
        """Load what `state_dicts` returned. Raises ValueError if it is of other agents.

        "explorer_critic" may be missing: it is saved once there was an explorer.
        """
        agents = {"policy"} if self.critic is None else {"policy", "critic"}
        optional = set() if self.critic is None else {"explorer_critic"}
        if not agents <= states.keys() <= agents | optional:
            raise ValueError(f"the saved agents are {sorted(states)}, but the run has {sorted(agents)}")
        self.load_state_dict(states["policy"])
        if self.critic is not None:
            self.critic.load_state_dict(states["critic"])
        if "explorer_critic" in states:
            explorer = self.fork("explorer")
            explorer.critic.load_state_dict(states["explorer_critic"])
            explorer.discard()

    def save(self, folder: str | Path) -> None:
        """Save the tokenizer and the weights: the adapter (LoRA), or the whole model.

        `PeftModel.from_pretrained` loads the adapter, `AutoModelForCausalLM.from_pretrained` the whole model.
        """
        if self.base.peft is None:
            self.model.save_pretrained(folder)
        else:
            self.save_adapter(folder)
        self.chat.tokenizer.save_pretrained(folder)

    def save_adapter(self, folder: str | Path) -> None:
        """Save only the LoRA adapter, in the format of peft and vLLM."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        Path(folder).mkdir(parents=True, exist_ok=True)
        weights = get_peft_model_state_dict(self.base.peft, adapter_name=self.name)
        weights = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
        save_file(weights, Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
        self.base.peft.peft_config[self.name].save_pretrained(folder)


class Critic(Agent):
    """V(state before a token): weights of its own and a linear head that starts at 0   (PPO)"""

    def __init__(self, base: Base, name: str, settings: AgentSettings):
        self.head = nn.utils.skip_init(nn.Linear, base.config.hidden_size, 1, device=base.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        super().__init__(base, name, settings, settings.critic_learning_rate, self.head)

    def values(self, batch: Batch) -> Tensor:
        """Return the value (B, T) of the state before each action token, 0 elsewhere."""
        states, places = self.base.states(self.activate(), batch)
        values = scatter_tokens(self.head(states.float())[:, 0], places, batch)
        return self._reactivate_in_backward(values)
