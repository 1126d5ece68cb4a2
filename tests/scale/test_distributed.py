"""Ranks: two and three processes compute the same results as one. These tests start real processes."""

import copy
import json
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import rspo
from baselines import spear
from batch import gather_columns, rows_of
from buffer import Group, ReplayBuffer, Step, StopReason, Trajectory
from config import Config
from demo.tiny_model import tiny_base
from demo.toy import CountingScorer, ToyPolicy, toy_world
from demo.warm_start import demonstrations, warm_start
from dense.implicit import ImplicitReward
from record.metrics import episode_metrics
from scale import distributed, launch
from scale.distributed import (
    RankLost,
    check_alike,
    gather,
    map_over_ranks,
    on_rank_0,
    rank,
    shares,
    sum_gradients,
)

ROOT = Path(__file__).parent.parent.parent
SMALL = Config(
    total_updates=2,
    k=1,
    tasks_per_update=4,
    group_size=4,
    off_policy_fraction=0.25,
    buffer_tasks=3,
    kl_coef=0.1,
    entropy_coef=0.01,
    minibatch_turns=10_000,
)


def config_of(algo, **options):
    return Config(**{**vars(SMALL), "algo": algo, **options})


# --- scenes: every rank runs them on recorded episodes; they return plain data -----------------------------


def agent(learning_rate=0.01):
    """Make a policy that wins some of its games and differs from its reference."""
    policy = ToyPolicy(learning_rate=learning_rate)
    policy.logits.data[3, 5] += 1.2
    return policy


def recorded():
    """Return {algorithm: (fresh groups, replayed successes)}, played by one process."""
    made = {}
    for algo in ("grpo", "gigpo", "ppo"):
        config, policy = config_of(algo), agent()
        bold = policy.fork("explorer")
        bold.logits.data[3, 5] += 0.5
        world = toy_world(config.episodes_per_task, seed=5)
        stored = world.collect(bold, config.buffer_groups)
        rspo.set_behavior_logprobs(bold, stored, config)
        rspo.swap_rewards(stored, config)
        replay = ReplayBuffer()
        replay.add(stored)
        groups = toy_world(config.episodes_per_task).collect(policy, config.on_policy_tasks)
        made[algo] = groups, replay.sample(4)
    return made


def chat(turns, outcome):
    """Make an episode of an append-only chat: one row, whose length grows with the turns."""
    steps = []
    for i in range(turns):
        prompt = [2, 6, 3, *[5, 1, 2, 7, 3] * i]
        steps.append(Step(prompt, [5, 1], [0.0, 0.0], f"door {i % 3}", "right", True))
    return Trajectory("toy", "walk", "Left", steps, outcome, outcome == 1, StopReason.FINISHED)


def one_gradient(config, on, off):
    """Return the gradients of an update with one optimizer step, and its metrics."""
    policy, seen = agent(), {}
    trained = (policy, policy.logits, "policy"), (policy.critic, policy.critic.table, "critic")
    for one, tensor, name in trained:
        one.step = lambda norm, tensor=tensor, name=name: seen.update({name: tensor.grad.tolist()}) or 0.5
    metrics = rspo.update(policy, on, off, "outcome", config, random.Random(0))
    return seen, without_times(metrics)


def without_times(metrics):
    return {name: value for name, value in metrics.items() if name != "seconds_update"}


def gradients(episodes):
    return {algo: one_gradient(config_of(algo), *episodes[algo]) for algo in episodes}


def many_steps(episodes):
    """Update with fewer rows in a minibatch than ranks, for two epochs. Return weights and metrics."""
    done = {}
    for algo, (on, off) in episodes.items():
        config = config_of(algo, minibatch_turns=4, epochs=2, tokens_per_micro_batch=16, clip_eps=0.02)
        policy = agent()
        metrics = rspo.update(policy, on, off, "outcome", config, random.Random(0))
        done[algo] = policy.logits.tolist(), policy.critic.table.tolist(), without_times(metrics)
    return done


def near_tokens(episodes):
    """An update that leaves every second replayed turn out, as its centre is beyond --max_centre."""
    on, off = copy.deepcopy(episodes["grpo"])
    for member in off:
        for step in member.steps[::2]:
            step.behavior_logprobs = [logprob - 2.0 for logprob in step.behavior_logprobs]
    return one_gradient(config_of("grpo", max_centre=2.0, tokens_per_micro_batch=16), on, off)


def uneven(episodes):
    """Return gradients for shares that are uneven: one long episode among short ones; three episodes; one."""
    config = config_of("grpo")
    long = [chat(14, 0.0), chat(1, 1.0), chat(1, 1.0), chat(1, 1.0)]
    groups = {"long": long, "three": [chat(1, 1.0), chat(1, 0.0), chat(2, 0.0)], "one": [chat(1, 1.0)]}
    return {name: one_gradient(config, [Group("toy", members)], []) for name, members in groups.items()}


def played(episodes):
    """Return the training episodes, panel and demonstrations that this rank has after the rollouts."""
    world, policy = toy_world(4, parallel=3), ToyPolicy()
    groups = world.collect(policy, 3)
    panel = world.evaluate(policy, "eval", 3, 0.4)
    shown = demonstrations(world, 5, 0.5, 0.2)
    members = [member for group in groups for member in group.trajectories]
    state = world.state_dict(), [group.task_id for group in groups]
    return [episode.to_dict() for episode in members + panel + shown], state


def replay(episodes):
    """Draw from a buffer of six groups. Check that the ranks together train on every row once."""
    buffer = ReplayBuffer(seed=3)
    for groups in [episodes["grpo"][0], episodes["gigpo"][0]]:
        buffer.add(groups)
    drawn = buffer.sample(8)
    rows = [row for episode in drawn for row in rows_of(episode)]
    used = sorted(gather(rspo.local_rows(rows)))
    assert used == list(range(len(rows))) and len(rows) > 8
    return [episode.to_dict() for episode in drawn]


def algorithm_1(episodes):
    """Run two loops of Algorithm 1, with GRPO, with PPO, and with a buffer of B's and A's batches."""
    lines = []
    both = dict(buffer_source="both", buffer_keep=99, replay_strategy="positive")
    for config in (config_of("grpo"), config_of("ppo"), config_of("gigpo", **both)):
        policy, world = agent(1e-3), toy_world(config.episodes_per_task)
        rspo.train(policy, world, CountingScorer(), config, lambda *line: lines.append(line))
        check_alike([policy.logits])
    return [
        (agent, episode_metrics(groups, "outcome"), without_times(metrics), updates)
        for agent, groups, metrics, updates in lines
    ]


def self_imitation(episodes):
    """Run four updates of SPEAR. Return its log, its last buffer and its weights."""
    lines, states = [], []
    options = dict(method="spear", total_updates=4, spear_buffer=4, spear_warmup=1, spear_cov_low=-1.0)
    config, policy = config_of("gigpo", **options, minibatch_turns=12), agent(1e-3)
    spear.train(
        policy,
        toy_world(config.episodes_per_task),
        None,
        config,
        lambda _, groups, metrics, updates: lines.append((without_times(metrics), updates)),
        lambda updates, replay: states.append(replay.state_dict()),
    )
    check_alike([policy.logits])
    return lines, states[-1], policy.logits.tolist()


class Reader(nn.Module):
    """A backbone that counts the rows it reads."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=4))
        self.table = nn.Embedding.from_pretrained(torch.arange(60.0).reshape(15, 4).sin())
        self.read = 0

    def forward(self, input_ids, use_cache):
        self.read += len(input_ids)
        return SimpleNamespace(last_hidden_state=self.table(input_ids).cumsum(1))


def dense_scores(episodes):
    """Score groups with two equal episodes each. Return the noisy scores and the rows read by all ranks."""
    from reward_model import StepRewardModel

    model = StepRewardModel(Reader(), ToyPolicy.chat)
    nn.init.ones_(model.head[2].weight)
    groups = [Group(str(n), [chat(n, 1.0), chat(n, 1.0), chat(n + 1, 0.0)]) for n in (1, 3, 5)]
    groups[1].trajectories[2].stop_reason = StopReason.CRASHED
    model.score(groups, noise=0.1, rng=random.Random(0))
    scores = [s.dense_score for group in groups for member in group.trajectories for s in member.steps]
    return scores, sum(gather([model.backbone.read]))


def implicit(episodes):
    """Train the implicit reward on uneven groups. Return its scores, metrics and weights."""
    prm = ToyPolicy("implicit", learning_rate=0.1)
    reward = ImplicitReward(prm, 1.0, config_of("grpo", tokens_per_micro_batch=16))
    groups = [Group(str(n), [chat(n, 1.0), chat(n, 1.0), chat(n + 1, 0.0)]) for n in (1, 3, 9)]
    groups += episodes["grpo"][0]
    metrics = [reward.learn(groups) for _ in range(3)]
    reward.score(groups, noise=0.1, rng=random.Random(0))
    check_alike(prm.parameters)
    scores = [s.dense_score for group in groups for member in group.trajectories for s in member.steps]
    return scores, metrics, prm.logits.tolist()


def columns(episodes):
    """Gather columns that each rank has set on its rows. Return them, and a column that no rank has set."""
    rows = rows_of(chat(1, 0.0)) + rows_of(chat(3, 1.0)) + rows_of(chat(2, 1.0))
    local = rspo.local_rows(rows)
    for i in local:
        rows[i].old_logprobs = rows[i].action_mask * (torch.arange(len(rows[i].input_ids)) + i / 3)
    gather_columns(rows, local, ["old_logprobs", "old_values"])
    return [row.old_logprobs.tolist() for row in rows], [row.old_values for row in rows]


def supervised(episodes):
    """Warm-start a tiny model and fit a reward model. Return losses, report and weights."""
    from reward_model import StepRewardModel

    base = tiny_base(["door", "left", "right"], d_model=16, heads=2, intermediate=32)
    shown = [chat(turns, float(turns % 2)) for turns in (1, 5, 2, 3, 1, 4, 2)]
    for i, episode in enumerate(shown):
        episode.task_id = f"task {i}"
    losses = warm_start(base, shown, updates=6, turns_per_update=4, learning_rate=1e-3)
    model, fitted = StepRewardModel.from_base(base, tokens_per_micro_batch=64), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model learns too little
        report = model.fit(shown, epochs=4, progress=lambda *update: fitted.append(update))
    weights = [weight.tolist() for weight in [*base.model.parameters(), *model.parameters()]]
    return losses, fitted, report, weights


def exchanges(episodes):
    """Call every function that exchanges data. Return the results of this rank."""
    n = distributed.world_size()
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    bucket, distributed.BUCKET = distributed.BUCKET, 4  # two parameters at a time
    parameters[0].grad = torch.tensor([1.0, 10.0])
    if rank() == n - 1:
        parameters[1].grad = torch.tensor([5.0, 6.0])
        parameters[3].grad = torch.tensor([float("nan"), 1.0])
    sum_gradients(parameters)
    distributed.BUCKET = bucket
    costs = [5, 1, 9, 3, 3]
    found = {
        "sums": [None if p.grad is None else p.grad.tolist() for p in parameters],
        "gathered": gather([f"rank {rank()}"] * rank()),
        "of rank 0": on_rank_0(lambda: f"said by {rank()}"),
        "in order": map_over_ranks(lambda items: [10 * item for item in items], costs, costs),
        "runs": map_over_ranks(lambda items: [(item, rank()) for item in items], [0, 1, 2, 3]),
        "too few": map_over_ranks(lambda items: list(items), ["one"], [7]),
    }
    try:
        check_alike([torch.tensor([1.0, 2.0 + (rank() == n - 1)])])
        found["alike"] = True
    except RuntimeError as error:
        found["alike"] = str(error)
    return found


SCENES = [gradients, many_steps, near_tokens, uneven, played, replay, algorithm_1, dense_scores, columns]
SCENES += [supervised, exchanges, implicit, self_imitation]


def loss(folder):
    """Kill the last rank while the others wait for it. Return the error of a waiting rank and its delay."""
    if rank() == distributed.world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RankLost) as caught:
        on_rank_0(lambda: distributed.wait())
    with open(folder / f"said {rank()}", "w") as sys.stderr:
        distributed.print_once(str(caught.value))
    return str(caught.value), time.monotonic() - started


def be(number, ports, folder):
    """Be rank `number` of two, if it exists, and then of three. Write results or a traceback to files."""
    torch.set_num_threads(1)
    for n, port in ports.items():
        if number >= n:
            continue
        os.environ.update(environment_of(number, n, port))
        try:
            distributed.start()
            episodes = (folder / "episodes").read_bytes()
            results = {scene.__name__: scene(pickle.loads(episodes)) for scene in SCENES}
            if n == 3:
                results["loss"] = loss(folder)
            else:
                distributed.stop()
        except Exception:
            results = traceback.format_exc()
        (folder / f"{n} {number}").write_bytes(pickle.dumps(results))
    if number == 0:
        time.sleep(1)  # this process hosts the store, which the others query before they print
    os._exit(0)


def hang(number, stopped, port, folder):
    """Be one of two ranks. Rank 0 works longer than the timeout, then the rank `stopped` is stopped.

    The other one waits for it and writes its message to a file.
    """
    os.environ.update(environment_of(number, 2, port))
    distributed.start()

    def end(why):
        (folder / f"hang {stopped}").write_text(why)
        os._exit(3)

    distributed.watch(0.1, end)  # 6 seconds
    started = time.monotonic()
    on_rank_0(lambda: [descend(turn % 50) for turn in range(400)] and None)  # 400 x 0.025 s = 10 s
    assert time.monotonic() >= started + 8
    if number == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    distributed.wait()


def descend(depth):
    """Sleep `depth` calls further down. Two looks at the stack rarely see the same depth."""
    if depth:
        return descend(depth - 1)
    time.sleep(0.025)


def environment_of(number, ranks, port):
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def one_process():
    episodes = pickle.dumps(recorded())
    return episodes, {scene.__name__: scene(pickle.loads(episodes)) for scene in SCENES}


@pytest.fixture(scope="module")
def processes(one_process, tmp_path_factory):
    """Run the scenes with two and with three ranks. Return the folder of the results."""
    folder, spawn = tmp_path_factory.mktemp("ranks"), get_context("spawn")
    (folder / "episodes").write_bytes(one_process[0])
    ports = {2: free_port(), 3: free_port()}
    started = [spawn.Process(target=be, args=(number, ports, folder)) for number in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join(600)
        if process.exitcode is None:
            process.kill()
            pytest.fail("a rank hangs")
    assert [process.exitcode for process in started] == [0, 0, -signal.SIGKILL]
    return folder


@pytest.fixture(params=[2, 3])
def ranks(request, processes):
    """The results of the first two ranks, of two or of three."""
    found = [pickle.loads((processes / f"{request.param} {i}").read_bytes()) for i in range(2)]
    for result in found:
        assert isinstance(result, dict), result
    return SimpleNamespace(n=request.param, found=found)


def close(one, other, path=""):
    """Check that nested data agrees: floats to 1e-5, everything else exactly."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            close(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, pair in enumerate(zip(one, other, strict=True)):
            close(*pair, f"{path}/{i}")
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5), path
    else:
        assert one == other, path


@pytest.mark.slow
@pytest.mark.parametrize(
    "scene",
    [
        "gradients",
        "many_steps",
        "near_tokens",
        "uneven",
        "played",
        "replay",
        "algorithm_1",
        "self_imitation",
        "columns",
        "supervised",
        "implicit",
    ],
)
def test_several_ranks_have_the_results_of_one_process(scene, one_process, ranks):
    for result in ranks.found:
        close(result[scene], one_process[1][scene])


def test_the_compared_gradients_are_not_zero(one_process):
    results = one_process[1]["gradients"]
    assert set(results) == {"grpo", "gigpo", "ppo"} and set(results["ppo"][0]) == {"policy", "critic"}
    for seen, metrics in results.values():
        assert all(torch.tensor(values).abs().max() > 1e-4 for values in seen.values())
        assert metrics["replayed_episodes"] == 4 and metrics["policy_loss_off"] < -0.1
    assert all(metrics["clip_fraction_on"] > 0 for _, _, metrics in one_process[1]["many_steps"].values())
    assert one_process[1]["near_tokens"][1]["centre_dropped"] == pytest.approx(
        2 / 3
    )  # turns 1 and 3 of three


def test_the_compared_run_of_spear_imitates_and_drops(one_process):
    metrics = [metrics for metrics, _ in one_process[1]["self_imitation"][0]]
    assert sum(line.get("spear_turns", 0) for line in metrics) >= 4
    assert any(0 < line.get("spear_dropped", 0) < 1 for line in metrics)


@pytest.mark.slow
def test_all_ranks_have_bit_identical_weights(ranks):
    for result in ranks.found:
        assert result["many_steps"] == ranks.found[0]["many_steps"]


@pytest.mark.slow
def test_equal_rows_of_a_group_are_scored_once_with_any_number_of_ranks(one_process, ranks):
    scores, read = one_process[1]["dense_scores"]
    assert read == 5  # one row for two equal episodes, one for the third; one of the three crashed
    assert scores.count(None) == 4 and len(set(scores)) == len(scores) - 3
    for result in ranks.found:
        close(result["dense_scores"], (scores, read))


@pytest.mark.slow
def test_exchanges_by_hand(ranks):
    two = ranks.n == 2
    for result in ranks.found:
        found = result["exchanges"]
        # every rank has gradient 0, only the last rank gradients 1 and 3, no rank gradient 2
        assert found["sums"][:3] == [[float(ranks.n), 10.0 * ranks.n], [5.0, 6.0], None]
        assert found["sums"][3][0] != found["sums"][3][0] and found["sums"][3][1] == 1.0
        assert found["gathered"] == ["rank 1", "rank 2", "rank 2"][: 1 if two else 3]
        assert found["of rank 0"] == "said by 0"
        assert found["in order"] == [50, 10, 90, 30, 30] and found["too few"] == ["one"]
        assert found["runs"] == [(0, 0), (1, 0 if two else 1), (2, 1 if two else 2), (3, ranks.n - 1)]
        assert "train different policies" in found["alike"]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_noticed_at_once_and_reported_once(processes):
    for i in range(2):
        message, seconds = pickle.loads((processes / f"3 {i}").read_bytes())["loss"]
        assert message.startswith(f"rank {i} of 3 has lost another rank") and seconds < 60
    assert sum(bool((processes / f"said {i}").read_text()) for i in range(2)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])  # rank 0 hosts the store
def test_a_rank_that_hangs_ends_the_others_and_one_that_works_does_not(stopped, tmp_path):
    spawn, port = get_context("spawn"), free_port()
    both = [spawn.Process(target=hang, args=(number, stopped, port, tmp_path)) for number in range(2)]
    for process in both:
        process.start()
    other = both[1 - stopped]
    other.join(600)
    both[stopped].kill()
    both[stopped].join()
    assert other.exitcode == 3
    said = (tmp_path / f"hang {stopped}").read_text()
    assert said == (
        f"--rank_timeout 0.1: rank {1 - stopped} of 2 waits, and no rank has made progress for so many "
        "minutes: one of them hangs or was stopped; raise it if one may need longer"
    )


def test_one_process_exchanges_nothing(one_process):
    found = one_process[1]["exchanges"]
    assert found["alike"] is True and found["gathered"] == []
    assert found["sums"][0] == [1.0, 10.0] and found["sums"][2] is None
    assert found["in order"] == [50, 10, 90, 30, 30]


def test_the_compared_supervised_training_learns_something(one_process):
    losses, fitted, report, _ = one_process[1]["supervised"]
    assert losses[-1] < losses[0] - 0.1 and fitted[-1][2] < fitted[0][2] - 0.01, (losses, fitted)
    assert (len(losses), len(fitted)) == (6, 4) and report["episodes"] == 6  # one of seven is held out


def test_shares_are_balanced_and_complete():
    # the most expensive first, to the smallest sum: 9 | 5, then 3 to 5, 3 to 8 (below 9), 1 to 9
    assert shares([5, 1, 9, 3, 3], 2) == [[1, 2], [0, 3, 4]]
    assert shares([1, 1, 1], 2) == [[0, 2], [1]]
    assert shares([4], 3) == [[0], [], []] and shares([], 2) == [[], []]
    rng = random.Random(0)
    costs = [rng.randrange(1, 300) for _ in range(200)]
    dealt = shares(costs, 8)
    assert sorted(place for share in dealt for place in share) == list(range(200))
    sums = [sum(costs[place] for place in share) for share in dealt]
    assert max(sums) - min(sums) < 10


# --- starting -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MASTER_PORT": None}, "are set, but not MASTER_PORT; start several processes with torchrun"),
        ({"RANK": None, "LOCAL_RANK": None}, "but not RANK, LOCAL_RANK"),
        ({"WORLD_SIZE": "two"}, "environment variable WORLD_SIZE=two: is not a number"),
        ({"RANK": "2"}, "environment variable RANK=2: must be below WORLD_SIZE=2"),
    ],
)
def test_broken_environment_variables_are_named(changes, words, monkeypatch):
    for name, value in (environment_of(0, 2, 29500) | changes).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        distributed.start()
    assert words in str(caught.value)


def test_without_the_variables_or_with_one_rank_nothing_is_started(monkeypatch):
    for name in launch.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    distributed.start()
    for name, value in environment_of(0, 1, 29500).items():
        monkeypatch.setenv(name, value)
    distributed.start()
    assert (rank(), distributed.world_size(), distributed.local_rank()) == (0, 1, 0)
    distributed.wait()
    distributed.stop()


# --- whole runs under torchrun ------------------------------------------------------------------------------

TINY = dict(
    k=1,
    tasks_per_update=4,
    group_size=2,
    off_policy_fraction=0.25,
    buffer_tasks=2,
    eval_games=6,
    eval_every=50,
    max_turns=5,
    max_prompt_tokens=128,
    minibatch_turns=32,
    tiny_width=16,
    tiny_layers=1,
    tiny_heads=2,
    learning_rate=0.001,
    warm_start=40,
    warm_start_episodes=60,
    warm_start_turns=32,
    warm_start_lr=0.01,
    reward_model_episodes=40,
    reward_model_epochs=1,
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]


def begin(command, *flags, **options):
    return subprocess.Popen(
        [*command, *flags, *(f"--{name}={value}" for name, value in options.items())],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def end(process, seconds=600):
    """Wait for the process to end. Return (status, stdout, stderr)."""
    try:
        said = process.communicate(timeout=seconds)
    finally:
        process.terminate()  # torchrun then ends its ranks
    return process.returncode, *said


def ranks_of(process):
    """Return the process ids of the ranks."""
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "train.py"], capture_output=True, text=True
    )
    return [int(one) for one in found.stdout.split()]


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in sorted(line) if not key.startswith("seconds")} for line in lines]


def wait_for(path, process):
    deadline = time.monotonic() + 600
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "two"
    status, said, errors = end(begin(TORCHRUN, total_updates=1, out=folder, **TINY))
    assert status == 0, errors
    assert said.count("run folder:") == said.count("warm start: done") == 1
    return folder


@pytest.mark.slow
def test_a_run_of_two_ranks_equals_the_run_of_one(run_of_two, tmp_path):
    status, _, errors = end(
        begin([sys.executable, "train.py", "--ranks=1"], total_updates=1, out=tmp_path / "one", **TINY)
    )
    assert status == 0, errors
    for name in ("start/model.safetensors", "reward_model/model.safetensors"):
        two, one = load_file(run_of_two / name), load_file(tmp_path / "one" / name)
        assert all(torch.allclose(two[key], one[key], atol=1e-4) for key in one), name
    two, one = lines_of(run_of_two), lines_of(tmp_path / "one")
    assert [line["agent"] for line in two] == ["evaluation", "explorer", "buffer", "policy", "evaluation"]
    close(two[:2], one[:2])  # after an update, rounding may change the samples
    for line, other in zip(two, one, strict=True):
        assert line.keys() == other.keys()
        assert line["environment_episodes"] == other["environment_episodes"]
    files = {path.name for path in run_of_two.iterdir()}
    assert files == {path.name for path in (tmp_path / "one").iterdir()}
    assert json.loads((run_of_two / "run.json").read_text())["ranks"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_run_resumes_with_another_number_of_ranks_and_ends_if_one_is_killed(run_of_two, tmp_path, number):
    folder = tmp_path / "on"
    shutil.copytree(run_of_two, folder)
    command = [sys.executable, "train.py", "--resume", "--ranks=1", f"--out={folder}"]
    status, _, errors = end(begin(command, total_updates=2))
    assert status == 0, errors
    assert lines_of(folder)[:4] == lines_of(run_of_two)[:4]  # lines after the checkpoint are removed
    process = begin(TORCHRUN, "--resume", f"--out={folder}", total_updates=1000)
    wait_for(folder / "checkpoints" / "update_000004", process)
    ranks = ranks_of(process)
    os.kill(ranks.pop(number), signal.SIGKILL)
    killed = time.monotonic()
    status, _, errors = end(process, 60)
    assert status != 0 and time.monotonic() - killed < 60
    assert "has lost another rank" in errors or "stopped; " in errors
    go_on = f" resume with: torchrun --nproc_per_node=2 train.py --resume --out {folder}"
    assert errors.count(go_on) == 1, errors
    with pytest.raises(ProcessLookupError):
        os.kill(*ranks, 0)
    policy = [line for line in lines_of(folder) if line["agent"] == "policy"]
    assert [line["update"] for line in policy][:4] == [1, 2, 3, 4]
    assert [line["environment_episodes"] for line in policy][:4] == [16, 32, 48, 64]


@pytest.mark.slow
def test_a_run_ends_with_a_message_when_a_rank_is_stopped(run_of_two, tmp_path):
    folder = tmp_path / "on"
    shutil.copytree(run_of_two, folder)
    process = begin(TORCHRUN, "--resume", f"--out={folder}", total_updates=1000, rank_timeout=0.05)
    wait_for(folder / "checkpoints" / "update_000002", process)
    os.kill(ranks_of(process)[1], signal.SIGSTOP)
    status, _, errors = end(process, 90)  # torchrun needs half a minute to kill a stopped process
    assert status != 0 and errors.count("error: --rank_timeout 0.05: rank 0 of 2 waits") == 1, errors
    assert f"resume with: torchrun --nproc_per_node=2 train.py --resume --out {folder}" in errors


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_a_scheduler_ends_all_ranks_with_one_message(run_of_two, tmp_path, sent):
    folder = tmp_path / "on"
    shutil.copytree(run_of_two, folder)
    process = begin(TORCHRUN, "--resume", f"--out={folder}", total_updates=1000)
    wait_for(folder / "checkpoints" / "update_000002", process)
    both = ranks_of(process)
    process.send_signal(sent)
    status, _, errors = end(process, 60)
    assert status != 0 and len(both) == 2
    for one in both:
        with pytest.raises(ProcessLookupError):
            os.kill(one, 0)
    go_on = f"torchrun --nproc_per_node=2 train.py --resume --out {folder}"
    assert errors.count("resume with: ") == 1 and go_on in errors


@pytest.mark.slow
def test_a_usage_error_is_reported_once_and_ends_all_ranks(tmp_path):
    status, said, errors = end(begin(TORCHRUN, "--k=0", f"--out={tmp_path / 'run'}"))
    assert status != 0 and (said + errors).count("error: --k 0: must be between 1 and 1000000") == 1
    status, said, errors = end(begin(TORCHRUN, "--no_such_flag"))
    assert status != 0 and (said + errors).count("there is no such flag") == 1, said + errors
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ranks_that_watch_each_other_end_without_an_abort():
    # The thread that counts progress is in the store nearly all the time, so also when Python shuts down
    script = """if True:
        from scale import distributed
        distributed.start()
        distributed.watch(1e-6, lambda why: None)
        distributed.wait()
        distributed.stop()"""
    for _ in range(5):
        port, ranks = free_port(), []
        for number in range(2):
            environment = os.environ | environment_of(number, 2, port)
            ranks.append(subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment))
        assert [process.wait(600) for process in ranks] == [0, 0]
