"""docs/WALKTHROUGH.md: the page is current, its arithmetic is right, and its sentences fit its numbers."""

import re

import pytest

from demo import walkthrough


@pytest.fixture(scope="module")
def loop():
    return walkthrough.play_loop()


@pytest.fixture(scope="module")
def values(loop):
    return walkthrough.values_of(loop)


def advantages_of(groups):
    """Return the advantages of all episodes, group by group."""
    return [[episode.steps[0].advantage for episode in group.trajectories] for group in groups]


def paths_of(groups):
    """Return the paths of all episodes, group by group."""
    return [[walkthrough.path_of(episode) for episode in group.trajectories] for group in groups]


def test_the_page_is_current(values):
    made = walkthrough.make_page(values)
    assert made == walkthrough.PAGE.read_text(encoding="utf-8"), (
        "docs/WALKTHROUGH.md is out of date: run `python -m demo.walkthrough` and read the page"
    )


def test_the_links_lead_to_files():
    targets = re.findall(r"\]\(([^):]+)\)", walkthrough.PAGE.read_text(encoding="utf-8"))
    assert len(targets) >= 15
    for target in targets:
        assert (walkthrough.PAGE.parent / target).is_file(), target


def test_advantages_and_gradient_of_b_by_hand(loop):
    first, second = advantages_of(loop.groups["explorer"])
    # R = 0, 0, 0, 10: mean 2.5, std sqrt((3 * 2.5^2 + 7.5^2) / 3) = 5
    assert first == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-5)
    # R = 10, 10, 0, 0: mean 5, std sqrt(4 * 25 / 3) = 5.7735, and 5 / 5.7735 = 0.86603
    assert second == pytest.approx([0.86603, 0.86603, -0.86603, -0.86603], abs=1e-5)
    # sum of A * (number of R): -0.5 * 9 + 1.5 * 2 + 0.86603 * (2 + 2 - 3 - 3) = -3.23206; / 48 = -0.06733
    step = loop.explorer.steps[0]
    assert step.gradient == pytest.approx(0.06733, abs=1e-5)
    assert step.passes[0].objective == pytest.approx(0.0, abs=1e-6)
    # Adam moves both logits by 0.15: the odds e^0.7 become e^0.4, and p = 1 / (1 + e^-0.4) = 0.59869
    assert (step.before, step.after) == pytest.approx((0.66819, 0.59869), abs=1e-5)


def test_ratio_and_objective_of_the_replayed_rows_by_hand(loop, values):
    # c = p of A / p of B = 0.66819 / 0.51945 = 1.28634
    assert values["c"] == pytest.approx(1.28634, abs=1e-4)
    # A_off of the four winners: 0.86603 + 1.5 + 1.5 + 0.86603 = 4.73206. Three "right" tokens with r = c and
    # three <end> tokens with r = 1: J_off = 4.73206 * (3 * 1.28634 + 3) / 24 = 1.35239; J_on = 0
    step = loop.policy.steps[0]
    assert step.passes[1].objective == pytest.approx(1.35239, abs=1e-4)
    assert step.total() == pytest.approx(1.35239 / 3, abs=1e-4)
    # gradient: -1/3 * 4.73206 * 3 * 1.28634 * (1 - 0.66819) / 24 = -0.08416
    assert step.gradient == pytest.approx(-0.08416, abs=1e-4)


def test_the_recorded_objectives_are_those_of_the_update(loop):
    for agent, steps in [("explorer", loop.explorer.steps), ("policy", loop.policy.steps)]:
        for number, source in enumerate(["on", "off"][: len(steps[0].passes)]):
            mean = sum(step.passes[number].objective for step in steps) / len(steps)
            assert loop.metrics[agent][f"policy_loss_{source}"] == pytest.approx(-mean, abs=1e-6)


def test_the_sentences_about_b_fit_the_numbers(loop, values):
    groups = loop.groups["explorer"]
    for group in groups:
        for episode in group.trajectories:
            assert (episode.outcome == 1) == (episode.steps[0].advantage < 0)  # every winner, no other
    assert sum(path.count("R") for group in paths_of(groups) for path in group if path != "R R R") == 6
    assert [step.passes[0].clipped_tokens for step in loop.explorer.steps] == [
        "0 of 48",
        "3 of 48",
        "18 of 48",
    ]
    last = loop.explorer.steps[-1]
    assert last.gradient < 0 and last.after < last.before  # the gradient has changed its sign, p still falls
    assert values["weak_winners"] == 0


def test_the_sentences_about_a_fit_the_numbers(loop, values):
    assert values["winners"] == 5
    assert all(episode.outcome == 1 and episode.steps[0].advantage > 0 for episode in loop.replay.drawn)
    assert len(loop.replay.drawn) == 4 and len(loop.replay) == 0
    assert advantages_of(loop.groups["policy"]) == [[0.0] * 4, [0.0] * 4]
    steps = loop.policy.steps
    assert steps[0].before == loop.explorer.steps[0].before  # phase 1 did not change A
    assert [step.passes[1].clipped_tokens for step in steps] == ["0 of 24", "0 of 24", "12 of 24"]
    assert steps[2].gradient == 0 and steps[2].after > steps[2].before
    replayed = steps[0].passes[1]  # a clip centred at 1 would drop every "right"
    ratios = (replayed.logprobs - replayed.batch.column("behavior_logprobs"))[
        replayed.batch.action_mask
    ].exp()
    assert int((ratios > 1.2).sum()) == 12


def test_the_last_sentences_fit_the_comparison(loop, values):
    (rspo, rspo_episodes), (grpo, grpo_episodes) = values["runs"]["rspo"], values["runs"]["outcome"]
    dense, _ = values["runs"]["dense"]
    assert dense[-1] < 0.001 < 0.9 < rspo[-1] <= grpo[-1]
    assert rspo_episodes == 4 * grpo_episodes
    assert rspo[0] == pytest.approx(walkthrough.p_right(loop.policy) ** 3, abs=1e-6)
