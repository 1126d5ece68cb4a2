"""TRL's side of `python -m bench core --trl PYTHON`: GRPO steps of its GRPOTrainer, one per request.

This file runs in its own Python environment (requirements/trl.txt), as `python -m bench.trl FOLDER SETTINGS`.
It takes one step for each line that it reads from stdin, and then prints the CPU-seconds of the step and the
extra memory so far. An experienced user of TRL would choose these settings for speed: a static cache, no
gradient checkpointing, no reference model (beta 0), one forward pass per optimizer step, and no logs or
checkpoints.
"""

from __future__ import annotations

import json
import sys
import time

from bench.goals import PeakMemory


def even_tokens(completion_ids: list[list[int]], **_) -> list[float]:
    """Return the reward of each reply: its share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def main(folder: str, settings: dict) -> None:
    """Train the model in `folder` until stdin ends."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    rows, optimizer_steps = settings["rows"], settings["optimizer_steps"]

    class OnRequest(TrainerCallback):
        """Wait for a line after each update, which has `optimizer_steps` steps on one set of replies."""

        def on_step_end(self, args, state, control, **_):
            if state.global_step % optimizer_steps == 0:
                seconds = time.process_time() - self.started
                print(json.dumps({"seconds": seconds, "gigabytes": self.memory.gigabytes()}), flush=True)
                self.wait(control)

        def on_train_begin(self, args, state, control, **_):
            self.memory = PeakMemory()
            self.wait(control)

        def wait(self, control):
            control.should_training_stop = not sys.stdin.readline()
            self.started = time.process_time()

    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=settings["autocast"],
        gradient_checkpointing=False,
        beta=0.0,
        num_iterations=1,
        temperature=1.0,
        learning_rate=1e-6,
        max_grad_norm=1.0,
        num_generations=settings["group_size"],
        per_device_train_batch_size=rows // optimizer_steps,
        gradient_accumulation_steps=1,
        steps_per_generation=optimizer_steps,
        max_completion_length=settings["new_tokens"],
        cache_implementation="static",
        max_steps=10**6,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=even_tokens,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": settings["prompts"]}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        callbacks=[OnRequest()],
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
