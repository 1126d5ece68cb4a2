"""Playing episodes: many environments at once, one batched `sample` call per turn (RSPO section 5).

`World` hands out tasks, plays them with a policy and returns whole groups; it also plays the fixed
evaluation panel and the demonstrations of the noisy expert. Every random draw of an episode comes from a
generator named after the run's seed, the purpose, the task and the member, so an episode does not depend
on which others are played beside it, and resuming a run needs no more than the position in the task
stream.

Environments live in a pool's slots, in this process or in workers; replies are read and prompts made here.
Of several ranks each plays its share of the episodes, and all are handed all of them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from buffer import Group, Step, StopReason, Trajectory
from chat import (
    NO_ACTION,
    Dialogue,
    first_message,
    next_message,
    parse_action,
)
from envs import Env, View
from sampler import Sample, Sampler
from scale import distributed
from scale.pool import Pool


@dataclass
class Episode:
    """One live episode: where it is played, what was said so far, and the steps recorded."""

    place: int  # among the episodes asked for; names its KV cache
    slot: int  # the pool's, that holds its environment
    env_name: str
    split: str
    index: int
    rng: random.Random
    step_limit: int
    dialogue: Dialogue
    view: View | None = None
    prompt_ids: list[int] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    stop_reason: StopReason | None = None

    def see(self, view: View | None) -> None:
        """Take in what the environment shows, None where it crashed: the end, or the next prompt."""
        if view is None:
            self.stop_reason = StopReason.CRASHED
            return
        self.view = view
        if view.done:
            self.stop_reason = StopReason.FINISHED
        elif len(self.steps) >= self.step_limit:
            self.stop_reason = StopReason.STEP_LIMIT
        else:
            self._show()

    def _show(self) -> None:
        """Make the next prompt; the episode is over when even its shortest form is too long."""
        said, turn = self.dialogue, len(self.steps)
        if said.context == "window":
            past = [(step.observation, step.action or NO_ACTION) for step in self.steps]
            self.prompt_ids = said.window_prompt(self.view, past)
        else:
            message = (
                next_message(said.style, self.view, turn)
                if self.steps
                else first_message(said.style, self.view)
            )
            self.messages.append(message)
            self.prompt_ids = said.full_prompt(self.env_name, self.messages, self.steps)
        if len(self.prompt_ids) > said.max_prompt_tokens:
            self.stop_reason = StopReason.TOKEN_LIMIT

    def receive(self, sample: Sample) -> str:
        """Record the reply to the last prompt; the action to send to the environment, or "" for none.

        An invalid reply is never sent on: the turn is spent, the state and so the observation stay as
        they were.
        """
        said = self.dialogue
        action, valid = (
            parse_action(said.style, said.chat.decode(sample.token_ids)) if sample.stopped else ("", False)
        )
        self.steps.append(
            Step(
                prompt_ids=self.prompt_ids,
                action_ids=sample.token_ids,
                sampler_logprobs=sample.logprobs,
                observation=self.view.observation,
                action=action,
                valid=valid,
                truncated=not sample.stopped,
            )
        )
        return action

    def trajectory(self) -> Trajectory:
        finished = self.stop_reason is StopReason.FINISHED
        return Trajectory(
            task_id=f"{self.env_name}/{self.split}/{self.index}",
            task=self.view.task if self.view else "",
            task_type=self.view.task_type if self.view else "",
            steps=self.steps,
            outcome=self.view.outcome if finished else 0.0,
            success=self.view.success if finished else False,
            stop_reason=self.stop_reason,
        )


class World:
    """Plays episodes of one environment with the policy it is given. Its state is its counters, nothing else.

    make_env: builds one environment; as many are made as episodes are played at once, and reused.
    parallel: episodes alive at once on a rank (memory of the KV cache); others start as these end.
    workers: processes of each rank that play the environments; 0: it plays them itself. With
        workers `make_env` must be picklable, and `close` ends them.
    """

    def __init__(
        self,
        make_env: Callable[[], Env],
        sampler: Sampler,
        dialogue: Dialogue,
        *,
        group_size: int,
        step_limit: int | None = None,
        temperature: float = 1.0,
        parallel: int = 128,
        seed: int = 0,
        workers: int = 0,
    ):
        self.sampler, self.dialogue = sampler, dialogue
        self.pool = Pool(make_env, min(workers, parallel))
        env = self.pool.env
        self.name, self.task_types = env.name, env.task_types
        self.step_limit = step_limit or env.step_limit
        self.group_size, self.temperature, self.parallel, self.seed = group_size, temperature, parallel, seed
        self.tasks = 0  # training tasks handed out so far: the position in the task stream
        self.episodes = 0  # training episodes played so far, crashed ones included
        self.turns = 0  # training turns played so far

    def collect(self, policy, tasks: int) -> list[Group]:
        """Play the next `tasks` training tasks, N episodes each from the same start, and return whole
        groups."""
        positions = range(self.tasks, self.tasks + tasks)
        self.tasks += tasks
        trajectories = self._play_with(
            policy,
            self.temperature,
            [
                ("train", self.game(position), f"train {position} {member}")
                for position in positions
                for member in range(self.group_size)
            ],
        )
        self.episodes += len(trajectories)
        self.turns += sum(len(trajectory.steps) for trajectory in trajectories)
        members = [
            trajectories[i : i + self.group_size] for i in range(0, len(trajectories), self.group_size)
        ]
        return [
            Group(f"{group[0].task_id}#{position}", group)
            for position, group in zip(positions, members, strict=True)
        ]

    def evaluate(self, policy, split: str, games: int, temperature: float) -> list[Trajectory]:
        """A fixed panel: games 0..games-1 of the split, each once; not counted as training."""
        return self._play_with(
            policy, temperature, [(split, index, f"{split} {index}") for index in range(games)]
        )

    def practice(self, policy, episodes: int, games: int | None = None) -> list[Trajectory]:
        """Training games played by a policy, but not for its training: not counted, and drawn as those of the
        demonstrations are."""
        drawn = self.draw_games("practice", episodes, games)
        specs = [("train", game, f"practice {i}") for i, game in enumerate(drawn)]
        return self._play_with(policy, self.temperature, specs)

    def draw_games(self, purpose: str, episodes: int, games: int | None) -> list[int]:
        rng, size = random.Random(f"{self.seed} {purpose} games"), self.pool.env.size("train")
        if games is None:
            return [rng.randrange(size) for _ in range(episodes)]
        return [self.game(rng.randrange(games)) for _ in range(episodes)]

    def game(self, position: int) -> int:
        """The training game at that place of the stream: each game once per epoch, in an order of the run's
        seed."""
        size = self.pool.env.size("train")
        return _epoch_order(self.seed, position // size, size)[position % size]

    def opening_tokens(self) -> int:
        """Length of the first prompt of a game: the first of a few that does not crash."""
        for game in range(min(8, self.pool.env.size("train"))):
            episode = Episode(0, 0, self.name, "train", game, random.Random(0), 1, self.dialogue)
            episode.see(self.pool.reset({0: ("train", game)})[0])
            if episode.view:
                break
        return len(episode.prompt_ids)

    def close(self) -> None:
        """End the worker processes and the sampler's engine; nothing can be played afterwards."""
        self.pool.close()
        self.sampler.close()

    def state_dict(self) -> dict[str, int]:
        return {"tasks": self.tasks, "episodes": self.episodes, "turns": self.turns}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.tasks, self.episodes, self.turns = state["tasks"], state["episodes"], state["turns"]

    def _play_with(self, policy, temperature: float, specs: list[tuple[str, int, str]]) -> list[Trajectory]:
        def answer(live: list[Episode]) -> list[Sample]:
            return self.sampler.sample(
                policy,
                [episode.prompt_ids for episode in live],
                episodes=[episode.place for episode in live],
                rngs=[episode.rng for episode in live],
                temperature=temperature,
                max_tokens=self.dialogue.max_new_tokens,
            )

        self.sampler.reset()
        played = self.play(answer, specs)
        self.sampler.reset()  # an update needs the cache's memory
        return played

    def play(
        self, answer: Callable[[list[Episode]], Iterable[Sample | None]], specs: list[tuple[str, int, str]]
    ) -> list[Trajectory]:
        """Play (split, game, name of its random draws) to the end; results in the given order.

        An answer of None says that the environment has crashed.
        """
        return distributed.map_over_ranks(functools.partial(self._play_here, answer), specs)

    def _play_here(self, answer: Callable, specs: list[tuple[str, int, str]]) -> list[Trajectory]:
        """This rank's share, `parallel` at a time."""
        free = list(range(min(self.parallel, len(specs))))[::-1]
        waiting = list(enumerate(specs))[::-1]
        live, done = [], {}
        while live or waiting:
            begun = []
            while waiting and free:
                place, (split, index, name) = waiting.pop()
                rng, slot = random.Random(f"{self.seed} {name}"), free.pop()
                begun.append(
                    Episode(place, slot, self.name, split, index, rng, self.step_limit, self.dialogue)
                )
            views = self.pool.reset({episode.slot: (episode.split, episode.index) for episode in begun})
            for episode in begun:
                episode.see(views[episode.slot])
            live += begun

            playing = [episode for episode in live if episode.stop_reason is None]
            replies = zip(playing, answer(playing) if playing else [], strict=True)
            actions = {episode.slot: episode.receive(reply) for episode, reply in replies if reply}
            views = self.pool.step({slot: action for slot, action in actions.items() if action})
            for episode in playing:
                unchanged = episode.view if actions.get(episode.slot) == "" else None
                episode.see(views.get(episode.slot, unchanged))

            for episode in live:
                if episode.stop_reason is not None:
                    done[episode.place] = episode.trajectory()
                    free.append(episode.slot)
            live = [episode for episode in live if episode.stop_reason is None]
        return [done[place] for place in range(len(specs))]


@functools.lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed} games of epoch {epoch}").shuffle(order)
    return order
