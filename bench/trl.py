"""TRL's side of `python bench.py core --trl PYTHON`: whole GRPO steps of its GRPOTrainer, one when asked.

Run by the Python of an environment of its own (requirements/trl.txt): `bench_trl.py FOLDER '{settings}'`.
After each optimizer step it prints the CPU-seconds since it was last told to go on, and waits for a line on
stdin. Its settings are the best that a user who knows it would choose here: fp32, a static cache, no gradient
checkpointing, no reference model (beta 0), the rows of an optimizer step in one forward pass, nothing logged
or saved.
"""

from __future__ import annotations

import json
import sys
import time


def even_tokens(completion_ids: list[list[int]], **_) -> list[float]:
    """The reward: the share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def main(folder: str, settings: dict) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    rows, parts = settings["rows"], settings["optimizer_steps"]

    class OnRequest(TrainerCallback):
        """An update is `parts` optimizer steps on what was generated before the first of them."""

        def on_step_end(self, args, state, control, **_):
            if state.global_step % parts == 0:
                print(json.dumps({"seconds": time.process_time() - self.started}), flush=True)
                self.wait(control)

        def on_train_begin(self, args, state, control, **_):
            self.wait(control)

        def wait(self, control):
            control.should_training_stop = not sys.stdin.readline()
            self.started = time.process_time()

    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        beta=0.0,
        num_iterations=1,
        temperature=1.0,
        learning_rate=1e-6,
        max_grad_norm=1.0,
        num_generations=settings["group_size"],
        per_device_train_batch_size=rows // parts,
        gradient_accumulation_steps=1,
        steps_per_generation=parts,
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
