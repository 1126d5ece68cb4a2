"""Playing episodes: many environments at once, one batched `sample` call per turn (RSPO section 5).

`Episode` records one game that is being played. `World` chooses the training games and plays them with a
policy. It returns whole groups for training, and single episodes for evaluation and for the reward model.

Every random draw of an episode comes from a generator named after the run's seed and the episode's purpose,
task and member, for example "7 train 12 3". So an episode does not depend on the others that are played at
the same time, and a resumed run only needs the position in the stream of tasks.

The environments run in the slots of a pool, in this process or in worker processes (scale/pool.py). With
several ranks each rank plays a share of the episodes, and all episodes are gathered on every rank.

Left out:
* Asynchronous rollouts: a turn waits for its slowest environment. The environments of this project are much
  faster than the model.
* Playing a crashed episode again: it stays in its group, marked, and is not trained on.
* Drawing more tasks in place of groups with equal rewards (as DAPO does).
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from buffer import Group, Step, StopReason, Trajectory
from chat import NO_ACTION, Dialogue, first_message, next_message
from envs import Env, View
from sampler import Sample, Sampler
from scale import distributed
from scale.pool import Pool


@dataclass
class Episode:
    """One game that is being played: where it runs, its last view, and the steps recorded so far."""

    number: int  # its place among the episodes of one `play`; identifies its row in the KV cache
    slot: int  # the pool's slot that holds its environment
    env_name: str
    split: str
    index: int  # place of the game in its split
    rng: random.Random
    step_limit: int
    dialogue: Dialogue
    view: View | None = None
    prompt_ids: list[int] = field(default_factory=list)  # the next prompt
    messages: list[str] = field(default_factory=list)  # full context: the user message of each turn
    steps: list[Step] = field(default_factory=list)
    stop_reason: StopReason | None = None  # None while it is played

    def observe(self, view: View | None) -> None:
        """Continue with the next view: make the next prompt, or stop. None: the environment crashed."""
        if view is None:
            self.stop_reason = StopReason.CRASHED
            return
        if self.steps and view.progress is not None:
            self.steps[-1].progress_gain = view.progress - self.view.progress
        self.view = view
        if view.done:
            self.stop_reason = StopReason.FINISHED
        elif len(self.steps) >= self.step_limit:
            self.stop_reason = StopReason.STEP_LIMIT
        else:
            self.prompt_ids = self._next_prompt()
            if len(self.prompt_ids) > self.dialogue.max_prompt_tokens:  # even in its shortest form
                self.stop_reason = StopReason.TOKEN_LIMIT

    def _next_prompt(self) -> list[int]:
        dialogue = self.dialogue
        if dialogue.context == "window":
            past = [(step.observation, step.action or NO_ACTION) for step in self.steps]
            return dialogue.window_prompt(self.view, past)
        if self.steps:
            message = next_message(dialogue.style, self.view, len(self.steps))
        else:
            message = first_message(dialogue.style, self.view)
        self.messages.append(message)
        return dialogue.full_prompt(self.env_name, self.messages, self.steps)

    def receive(self, sample: Sample) -> str:
        """Record the reply to the last prompt. Returns the action for the environment, "" if there is none.

        A reply is invalid if `parse_action` finds no action in it, or if it reached the token limit. It uses
        up its turn: the environment gets no action, the next prompt shows the same observation, and the
        return loses `invalid_penalty` (`rspo.step_returns`). Its tokens are trained on like all others.
        """
        action, valid = "", False
        if sample.stopped:
            action, valid = self.dialogue.read(sample.token_ids)
        step = Step(
            prompt_ids=self.prompt_ids,
            action_ids=sample.token_ids,
            sampler_logprobs=sample.logprobs,
            observation=self.view.observation,
            action=action,
            valid=valid,
            truncated=not sample.stopped,
        )
        self.steps.append(step)
        return action

    def trajectory(self) -> Trajectory:
        """Return the record of a stopped episode. Unless the game has finished, the outcome is 0."""
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
    """Plays episodes of one environment. Its state consists of three counters.

    make_env: builds one environment. The world has one for each episode that is played at the same time.
    group_size: N, episodes per training task.
    step_limit: turns per episode; None: the environment's own limit.
    temperature: sampling temperature of training episodes.
    parallel: episodes played at once on each rank; the KV cache grows with it. The rest wait for a slot.
    seed: decides the order of games and all draws.
    workers: processes of each rank that run the environments; 0: they run in this process. With workers
        `make_env` must be picklable. `close` ends the processes.
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
        self.tasks = 0  # training tasks started so far: the position in the stream of tasks
        self.episodes = 0  # training episodes played so far, including crashed ones
        self.turns = 0  # training turns played so far

    def collect(self, policy, tasks: int) -> list[Group]:
        """Play the next `tasks` training tasks, N episodes each. Returns one group per task."""
        positions = range(self.tasks, self.tasks + tasks)
        self.tasks += tasks
        specs = []
        for position in positions:
            game = self.game(position)
            specs += [("train", game, f"train {position} {member}") for member in range(self.group_size)]
        trajectories = self._sample_and_play(policy, self.temperature, specs)
        self.episodes += len(trajectories)
        self.turns += sum(len(trajectory.steps) for trajectory in trajectories)
        groups = []
        for i, position in enumerate(positions):
            members = trajectories[i * self.group_size : (i + 1) * self.group_size]
            groups.append(Group(f"{members[0].task_id}#{position}", members))
        return groups

    def evaluate(self, policy, split: str, games: int, temperature: float) -> list[Trajectory]:
        """Play games 0 to games - 1 of the split, once each. The counters do not change."""
        specs = [(split, index, f"{split} {index}") for index in range(games)]
        return self._sample_and_play(policy, temperature, specs)

    def practice(self, policy, episodes: int, games: int | None = None) -> list[Trajectory]:
        """Play training games for the reward model to learn from. The counters do not change.

        games: see `draw_games`.
        """
        drawn = self.draw_games("practice", episodes, games)
        specs = [("train", game, f"practice {i}") for i, game in enumerate(drawn)]
        return self._sample_and_play(policy, self.temperature, specs)

    def draw_games(self, purpose: str, episodes: int, games: int | None) -> list[int]:
        """Draw a training game for each episode, independently of the stream of tasks.

        games: draw only from the first `games` of the stream, because new games are expensive to load; None:
        from all. Game i does not depend on the number of episodes.
        """
        rng, size = random.Random(f"{self.seed} {purpose} games"), self.pool.env.size("train")
        if games is None:
            return [rng.randrange(size) for _ in range(episodes)]
        return [self.game(rng.randrange(games)) for _ in range(episodes)]

    def game(self, position: int) -> int:
        """Return the training game at this position of the stream of tasks.

        Each epoch contains every game once, in an order drawn from the seed.
        """
        size = self.pool.env.size("train")
        return _epoch_order(self.seed, position // size, size)[position % size]

    def opening_tokens(self) -> int:
        """Return the length in tokens of a game's first prompt. Games that crash are skipped, up to eight."""
        for game in range(min(8, self.pool.env.size("train"))):
            episode = Episode(0, 0, self.name, "train", game, random.Random(0), 1, self.dialogue)
            episode.observe(self.pool.reset({0: ("train", game)})[0])
            if episode.view:
                break
        return len(episode.prompt_ids)

    def close(self) -> None:
        """End the worker processes and the sampler's engine. The world cannot play afterwards."""
        self.pool.close()
        self.sampler.close()

    def state_dict(self) -> dict[str, int]:
        return {"tasks": self.tasks, "episodes": self.episodes, "turns": self.turns}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.tasks, self.episodes, self.turns = state["tasks"], state["episodes"], state["turns"]

    def _sample_and_play(self, policy, temperature: float, specs: list[tuple]) -> list[Trajectory]:
        """Play with replies sampled from the policy. `specs`: see `play`."""

        def reply(episodes: list[Episode]) -> list[Sample]:
            return self.sampler.sample(
                policy,
                [episode.prompt_ids for episode in episodes],
                episodes=[episode.number for episode in episodes],
                rngs=[episode.rng for episode in episodes],
                temperature=temperature,
                max_tokens=self.dialogue.max_new_tokens,
            )

        self.sampler.reset()
        trajectories = self.play(reply, specs)
        self.sampler.reset()  # the update needs the memory of the cache
        return trajectories

    def play(
        self, reply: Callable[[list[Episode]], Iterable[Sample | None]], specs: list[tuple[str, int, str]]
    ) -> list[Trajectory]:
        """Play all episodes to their end. Returns their trajectories in the order of `specs`, on every rank.

        specs: (split, game, name of the episode's generator) of each episode. reply: called with the episodes
        of a turn; returns one reply for each, or None if its environment crashed.
        """
        return distributed.map_over_ranks(functools.partial(self._play_share, reply), specs)

    def _play_share(self, reply: Callable, specs: list[tuple[str, int, str]]) -> list[Trajectory]:
        """Play this rank's share of the episodes, at most `parallel` at once."""
        waiting = deque(enumerate(specs))
        free_slots = list(range(min(self.parallel, len(specs))))[::-1]  # popped from its end
        live: list[Episode] = []
        trajectories: dict[int, Trajectory] = {}
        while live or waiting:
            live += self._start(waiting, free_slots)
            self._play_turn(reply, [episode for episode in live if episode.stop_reason is None])
            for episode in live:
                if episode.stop_reason is not None:
                    trajectories[episode.number] = episode.trajectory()
                    free_slots.append(episode.slot)
            live = [episode for episode in live if episode.stop_reason is None]
        return [trajectories[number] for number in range(len(specs))]

    def _start(self, waiting: deque, free_slots: list[int]) -> list[Episode]:
        """Start a waiting episode in every free slot. Some stop at once: a crash, a long prompt."""
        started = []
        while waiting and free_slots:
            number, (split, index, name) = waiting.popleft()
            slot, rng = free_slots.pop(), random.Random(f"{self.seed} {name}")
            started.append(
                Episode(number, slot, self.name, split, index, rng, self.step_limit, self.dialogue)
            )
        views = self.pool.reset({episode.slot: (episode.split, episode.index) for episode in started})
        for episode in started:
            episode.observe(views[episode.slot])
        return started

    def _play_turn(self, reply: Callable, episodes: list[Episode]) -> None:
        """Play one turn of all episodes: one reply each, then the valid actions in their environments."""
        replies = reply(episodes) if episodes else []
        actions: dict[int, str] = {}  # by slot
        for episode, sample in zip(episodes, replies, strict=True):
            if sample is None:
                episode.observe(None)
            elif action := episode.receive(sample):
                actions[episode.slot] = action
            else:
                episode.observe(episode.view)  # an invalid reply: nothing has changed
        views = self.pool.step(actions)
        for episode in episodes:
            if episode.slot in actions:
                episode.observe(views[episode.slot])


@functools.lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed} games of epoch {epoch}").shuffle(order)
    return order
