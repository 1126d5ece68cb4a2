"""Tests of ALFWorld's game files: the games of a split, damaged files, the vocabulary."""

import json
import warnings
from pathlib import Path

import pytest

from games.alfworld_files import OFFICIAL_COUNTS, alfworld_games, alfworld_splits, alfworld_vocabulary

CUP_TASK = "pick_and_place_simple-Cup-None-Desk-1"


def write_game(folder: Path, split: str, task: str, trial: str = "trial_1", solvable=True) -> Path:
    path = folder / "json_2.1.1" / split / task / trial / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"grammar": "x" * 5000, "solvable": solvable, "walkthrough": ["look"]}))
    return path


@pytest.fixture
def tree(tmp_path):
    """A folder and its four playable games; two games are of one task. Other files must not be listed."""
    playable = [
        write_game(tmp_path, "train", "pick_two_obj_and_place-Pen-None-Bed-301"),
        write_game(tmp_path, "train", "look_at_obj_in_light-Mug-None-DeskLamp-308", "trial_2"),
        write_game(tmp_path, "train", "look_at_obj_in_light-Mug-None-DeskLamp-308", "trial_1"),
        write_game(tmp_path, "valid_seen", "pick_and_place_simple-Mug-None-Desk-308"),
    ]
    write_game(tmp_path, "train", "pick_and_place_with_movable_recep-Pen-Mug-Desk-308")
    write_game(tmp_path, "train", "pick_heat_then_place_in_recep-AppleSliced-None-Desk-3")
    write_game(tmp_path, "train", "pick_and_place_simple-Pen-None-Desk-309", solvable=False)
    (tmp_path / "json_2.1.1" / "train" / "look_at_obj_in_light-Pen-None-DeskLamp-1" / "t").mkdir(parents=True)
    return tmp_path, playable


@pytest.fixture(autouse=True)
def empty_cache():
    for function in (alfworld_games, alfworld_splits):
        function.cache_clear()
    yield
    for function in (alfworld_games, alfworld_splits):
        function.cache_clear()


def test_a_split_is_the_sorted_list_of_its_playable_files(tree):
    folder, playable = tree
    assert alfworld_games(str(folder), "train") == (playable[2], playable[1], playable[0])
    assert alfworld_games(str(folder), "valid_seen") == (playable[3],)
    assert alfworld_games(str(folder / "json_2.1.1"), "valid_seen") == (playable[3],)


def test_without_a_folder_the_variable_and_then_the_download_folder_are_used(tree, monkeypatch, tmp_path):
    folder, _ = tree
    monkeypatch.setenv("ALFWORLD_DATA", str(folder))
    assert len(alfworld_games(None, "train")) == 3
    alfworld_games.cache_clear()
    monkeypatch.delenv("ALFWORLD_DATA")
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(ValueError, match=str(home / ".cache" / "alfworld" / "json_2.1.1")):
        alfworld_games(None, "train")
    (home / ".cache").mkdir(parents=True)
    (home / ".cache" / "alfworld").symlink_to(folder)
    assert len(alfworld_games(None, "valid_seen")) == 1


def test_a_split_without_games_is_an_error_with_the_command_that_fetches_them(tree):
    with pytest.raises(ValueError, match=r"no ALFWorld games in .*/valid_unseen; .*`alfworld-download`"):
        alfworld_games(str(tree[0]), "valid_unseen")


GRAMMAR = '"grammar": "' + "x" * 5000 + '"'
LAYOUTS = [  # content of a game file, and whether the official loader plays it
    ('{"solvable": true, %s, "walkthrough": ["look"]}', True),
    ('{"solvable": false, %s, "walkthrough": ["look"]}', False),
    ('{%s, "solvable":false,"walkthrough":["look"]}', False),
    ('{%s, "solvable"\n :\ttrue , "walkthrough" : [ ] }\n', True),
    ('{%s, "walkthrough": ["look"]}', False),  # without the key
    ('{%s, "solvable": null}', False),
    ('{%s, "walkthrough": ["look"], "solvable": true}', True),
    ('  {%s, "solvable": true, "walkthrough": ["look"]}', True),
    ('{"solvable": true, "walkthrough": [], %s, "solvable": false, "walkthrough": []}', False),
    ('{"solvable": true, %s, "note": "x, \\"solvable\\": false, \\"walkthrough\\": []}"}', True),
    ('{%s, "note": "\\"solvable\\": true"}', False),
    ('{%s, "solvable": true, "part": {"solvable": false, "walkthrough": []}}', True),
    ('{%s, "part": {"solvable": true, "walkthrough": []}}', False),
    ('{%s, "solvable": true, "walkthrough": ["' + "y" * 5000 + '"]}', True),
]


@pytest.mark.parametrize("content, playable", LAYOUTS)
def test_a_game_is_played_if_its_json_has_a_true_solvable(tmp_path, content, playable):
    always = write_game(tmp_path, "train", CUP_TASK, "0")
    path = write_game(tmp_path, "train", CUP_TASK, "1")
    path.write_text(content % GRAMMAR)
    assert bool(json.loads(path.read_text()).get("solvable")) == playable
    assert alfworld_games(str(tmp_path), "train") == ((always, path) if playable else (always,))


def test_a_split_without_a_solvable_game_is_an_error(tmp_path):
    for number in range(3):
        write_game(tmp_path, "train", CUP_TASK, str(number), solvable=False)
    with pytest.raises(ValueError, match=r"^none of the 3 ALFWorld games in .*/train is marked"):
        alfworld_games(str(tmp_path), "train")
    write_game(tmp_path, "train", CUP_TASK, "damaged").write_text("{")
    alfworld_games.cache_clear()
    with (
        pytest.warns(UserWarning, match="^1 of 4 ALFWorld game files cannot be read"),
        pytest.raises(ValueError, match=r"^none of the 4 ALFWorld games"),
    ):
        alfworld_games(str(tmp_path), "train")


def test_other_numbers_of_games_than_the_official_ones_are_one_warning(tree, monkeypatch):
    folder, playable = tree
    unseen = write_game(folder, "valid_unseen", CUP_TASK)
    with pytest.warns(UserWarning) as caught:
        games = alfworld_splits(str(folder))
        alfworld_splits(str(folder))
    assert games["valid_seen"] == (playable[3],) and games["valid_unseen"] == (unseen,)
    (warning,) = caught
    assert str(warning.message).startswith(
        "ALFWorld has 3 games in train (official: 3,553), 1 games in valid_seen (official: 140), "
        "1 games in valid_unseen (official: 134); "
    )
    alfworld_splits.cache_clear()
    for split, number in (("train", 3), ("valid_seen", 1), ("valid_unseen", 1)):
        monkeypatch.setitem(OFFICIAL_COUNTS, split, number)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alfworld_splits(str(folder))


DAMAGED = ["{", '{"grammar": "x", "solvable": tr', "[]", "", "\x00\x93\xff}", None]  # None: a folder


def damage(path: Path, content: str | None) -> None:
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_text(content, encoding="latin-1")


def test_damaged_files_are_left_out_with_one_warning_per_split(tree):
    folder, _ = tree
    for split in ("train", "valid_seen", "valid_unseen"):
        for number, content in enumerate(DAMAGED):
            damage(write_game(folder, split, CUP_TASK, str(number)), content)
    # train: 3 playable, 1 unsolvable and 6 damaged files; valid_seen: 1 playable and 6 damaged files
    for split, n_playable, n_files in (("train", 3, 10), ("valid_seen", 1, 7)):
        with pytest.warns(UserWarning) as caught:
            assert len(alfworld_games(str(folder), split)) == n_playable
        (warning,) = caught
        message = str(warning.message)
        first = folder / "json_2.1.1" / split / CUP_TASK / "0" / "game.tw-pddl"
        assert message.startswith(f"6 of {n_files} ALFWorld game files cannot be read: {first}, ")
        end = "/2/game.tw-pddl, ...; they are left out; `alfworld-download -f` unpacks them again"
        assert message.endswith(end)
    with pytest.raises(ValueError, match=r"^6 of 6 ALFWorld game files cannot be read: .*`alfworld-download"):
        alfworld_games(str(folder), "valid_unseen")


def test_the_vocabulary_skips_damaged_files_with_one_warning(tmp_path):
    whole, *others = (write_game(tmp_path, "train", CUP_TASK, str(number)) for number in range(6))
    objects = "(:objects Cup_bar_1 - object Cup_bar_2 - object loc_bar_3_bar_4 - location) (:init"
    whole.write_text(json.dumps({"pddl_problem": objects, "grammar": "Your task is to: find a cup."}))
    contents = (
        "{]}",
        "{}",
        '{"pddl_problem": 3, "grammar": ""}',
        '{"pddl_problem": "", "grammar": ""}',
        None,
    )
    for path, content in zip(others, contents, strict=True):
        damage(path, content)
    with pytest.warns(UserWarning) as caught:
        words = alfworld_vocabulary((*others, whole))
    (warning,) = caught
    assert str(warning.message).startswith(f"5 of 6 ALFWorld game files cannot be read: {others[0]}, ")
    assert words[-7:] == ("find", "a", "cup.", "go to", "cup", "cup 1", "cup 2")  # two cups, and no "loc"
    with pytest.raises(ValueError, match=r"^5 of 5 ALFWorld game files cannot be read: .*`alfworld-download"):
        alfworld_vocabulary(tuple(others))
