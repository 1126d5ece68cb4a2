"""Prompts and the parser: what each style and context shows, and which replies count as an action."""

import random
import re

import pytest

from chat import FORMAT, first_message, next_message, parse_action, reply_text, system_message, window_message
from envs import View, make_env

VIEW = View(
    task="put a clean mug in desk.",
    task_type="Clean",
    observation="You arrive at bed 1. On the bed 1, you see a mug 1.",
    admissible=("go to desk 1", "look", "take mug 1 from bed 1"),
    notes="search safe 1; seen mug 1 in bed 1",
)
HISTORY = [("You are in the middle of a room.", "look"), ("The safe 1 is closed.", "go to bed 1")]


# ---- prompts


def test_short_prompts_literally():
    assert window_message("short", VIEW, HISTORY, 2) == (
        "put a clean mug in desk. | search safe 1; seen mug 1 in bed 1 | look; go to bed 1 | "
        "You arrive at bed 1. On the bed 1, you see a mug 1."
    )
    assert first_message("short", VIEW) == (
        "put a clean mug in desk. | search safe 1; seen mug 1 in bed 1 | "
        "You arrive at bed 1. On the bed 1, you see a mug 1."
    )
    assert next_message("short", VIEW, 3) == (
        "search safe 1; seen mug 1 in bed 1 | You arrive at bed 1. On the bed 1, you see a mug 1."
    )
    assert system_message("short", "household") is None


def test_the_think_prompt_of_a_window_literally():
    assert window_message("think", VIEW, HISTORY, 2) == (
        "You act in a world that is described to you in text. Your task is to: put a clean mug in desk.\n"
        "\n"
        "You have taken 2 steps so far. The last 2:\n"
        "[Observation: You are in the middle of a room.]\n"
        "[Action: look]\n"
        "[Observation: The safe 1 is closed.]\n"
        "[Action: go to bed 1]\n"
        "\n"
        "You are at step 3. You observe: You arrive at bed 1. On the bed 1, you see a mug 1.\n"
        "Admissible actions: 'go to desk 1', 'look', 'take mug 1 from bed 1'.\n"
        "\n"
        "Think step by step about where you are and what is still to be done, inside <think></think>. Then "
        "choose one admissible action and give it inside <action></action>, once, after your reasoning. "
        "That is:\n"
        "<think>your reasoning</think><action>your action</action>"
    )


def test_the_think_prompts_of_a_full_context_literally():
    assert system_message("think", "household") == (
        "You act in a household that is described to you in text, one action at a time, until the task is "
        "done. " + FORMAT
    )
    assert first_message("think", VIEW) == (
        "Your task is to: put a clean mug in desk.\n"
        "\n"
        "You observe: You arrive at bed 1. On the bed 1, you see a mug 1.\n"
        "Admissible actions: 'go to desk 1', 'look', 'take mug 1 from bed 1'."
    )
    assert next_message("think", VIEW, 3) == (
        "You are at step 4. You observe: You arrive at bed 1. On the bed 1, you see a mug 1.\n"
        "Admissible actions: 'go to desk 1', 'look', 'take mug 1 from bed 1'."
    )


def test_a_template_among_the_actions_is_listed_with_what_to_do_with_it():
    shop = View("Find me aprons", "garden", "Search", ("search[<your query>]",))
    assert next_message("think", shop, 3) == (
        "You are at step 4. You observe: Search\n"
        "Admissible actions: 'search[<your query>]'. In place of <your query> write what you search for."
    )


def test_less_history_leaves_task_observation_and_admissible_actions():
    lengths = []
    for kept in (2, 1, 0):
        text = window_message("think", VIEW, HISTORY[2 - kept :], 2)
        for part in (VIEW.task, VIEW.observation, *VIEW.admissible, FORMAT):
            assert part in text
        assert text.count("[Action:") == kept
        lengths.append(len(text))
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    "prompt", [window_message("think", VIEW, [], 0), system_message("think", "household")]
)
def test_a_reply_that_copies_the_prompts_example_parses(prompt):
    example = prompt.splitlines()[-1]
    assert parse_action("think", example) == ("your action", True)
    # One tag name changed on one side only would break this.
    assert set(re.findall(r"</?\w+>", prompt)) == {"<think>", "</think>", "<action>", "</action>"}


@pytest.mark.parametrize("style", ["think", "short"])
def test_every_demonstrated_reply_parses_back(style):
    env = make_env("household")
    for index in range(6):
        view = env.reset("train", index)
        while not view.done:
            for action in view.admissible:
                assert parse_action(style, reply_text(style, action)) == (action, True)
            view = env.step(env.expert())


# ---- the parser


@pytest.mark.parametrize(
    "reply, action",
    [
        ("<think>x</think><action>look</action>", "look"),
        (" <think>x</think>\n<action> Go To Desk 1 </action> ", "go to desk 1"),
        ("<think>x</think><action>go to\n\tdesk  1</action>", "go to desk 1"),
        ("<action>look</action>", "look"),  # no reasoning is allowed
        ("I look. <action>look</action> Done.", "look"),
        ("reasoning the prompt opened</think><action>look</action>", "look"),
        ("<think>我</think><action>look</action>", "look"),  # any language
        ("<action>search[red shoes, size 9]</action>", "search[red shoes, size 9]"),
        ("<action>click[Next >]</action>", "click[next >]"),
        ("<action>click[< Prev]</action>", "click[< prev]"),
        ("<action>search[laptop <$500]</action>", "search[laptop <$500]"),
        ("<action>search[cable <3 ft, price < 9]</action>", "search[cable <3 ft, price < 9]"),
        (
            "<action>fly to the moon</action>",
            "fly to the moon",
        ),  # admissible or not is the environment's answer
    ],
)
def test_one_closed_block_is_the_action(reply, action):
    assert parse_action("think", reply) == (action, True)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "look",
        "click[buy now]",
        "I am at the desk and now take mug 1 from desk 1",
        "<think>x</think><action>go to desk 1",  # stopped by the token limit
        "<think>x</think>go to desk 1</action>",
        "</action>look<action>",
        "<action></action>",
        "<action> \n </action>",
        "<action>look</action><action>go to desk 1</action>",
        "<think>maybe <action>help</action>?</think><action>go to desk 1</action>",
        "<think>maybe <action>help</action>?</think>",  # quoted, never given
        "<think>maybe <action>help</action>",
        "maybe <action>help</action>?</think>",
        "<action>look</action><think>x</think>",
        "<action><action>look</action>",
        "<action>look</action></action>",
        "<action>take <mug> 1</action>",
        "<action>look</think></action>",
        "<action>look</action</action>",
        "<action>search[<your query>]</action>",  # the template, not filled in
    ],
)
def test_everything_else_is_invalid(reply):
    assert parse_action("think", reply) == ("", False)


@pytest.mark.parametrize(
    "reply, parsed",
    [
        ("look", ("look", True)),
        (" Go  to\nDesk 1 ", ("go to desk 1", True)),
        ("click[< prev]", ("click[< prev]", True)),
        ("search[laptop <$500]", ("search[laptop <$500]", True)),
    ],
)
def test_a_short_reply_is_the_action(reply, parsed):
    assert parse_action("short", reply) == parsed


@pytest.mark.parametrize(
    "reply", ["", "  \n", "<action>look</action>", "go to <unk>", "search[<your query>]"]
)
def test_a_short_reply_is_not_empty_and_holds_no_tag(reply):
    assert parse_action("short", reply) == ("", False)


def test_no_shuffle_of_tags_gives_an_action_with_a_tag_in_it():
    rng = random.Random(0)
    pieces = [
        "<think>",
        "</think>",
        "<action>",
        "</action>",
        "look",
        "go to desk 1",
        "<",
        ">",
        " ",
        "\n",
        "</",
        "<ACTION>",
    ]
    found = 0
    for _ in range(500):
        reply = "".join(rng.choices(pieces, k=rng.randint(0, 8)))
        for style in ("think", "short"):
            action, valid = parse_action(style, reply)
            assert not re.search(r"<[^\s\d$€£=.+-]", action)
            assert valid == (action != "")
            assert action == " ".join(action.lower().split())
            found += valid
    assert 20 < found < 980  # both verdicts were seen


# ---- make_env


def test_an_unknown_environment_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="environment 'alfwrld' is unknown: .* household"):
        make_env("alfwrld")


def test_a_view_cannot_be_changed():
    view = make_env("household").reset("eval", 0)
    with pytest.raises(AttributeError):
        view.outcome = 1.0
    assert (view.outcome, view.success, view.done) == (0.0, False, False)
