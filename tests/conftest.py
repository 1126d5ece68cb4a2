"""Set-up of all tests: the device, no network, and ALFWorld's games, unpacked once per session."""

import importlib.metadata
import os
import tarfile
from pathlib import Path

import pytest
from device import DEVICE

from games import alfworld_engine

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")  # before a library reads them
if DEVICE == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # runs that tests start find no GPU either
else:  # tests that compare bits need sums in one order
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)

ALFWORLD = Path(__file__).parent.parent.parent / "shared" / "data" / "alfworld"
FEW = {  # one of each type, quick to translate: the splits that hold it
    "pick_and_place_simple-CreditCard-None-ArmChair-202": ("train", "valid_seen", "valid_unseen"),
    "look_at_obj_in_light-Bowl-None-DeskLamp-316": ("train", "valid_seen"),
    "pick_clean_then_place_in_recep-SoapBar-None-GarbageCan-416": ("train",),
    "pick_heat_then_place_in_recep-Mug-None-SideTable-21": ("train",),
    "pick_cool_then_place_in_recep-Pot-None-DiningTable-21": ("train",),
    "pick_two_obj_and_place-SoapBar-None-GarbageCan-424": ("train",),
}


def unpack(folder: Path, splits_of: dict[str, tuple[str, ...]] | None = None) -> Path:
    """Unpack these games, or all, below folder/json_2.1.1. Skip the test if they cannot be played."""
    for package in alfworld_engine.PACKAGES:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"the package {package} is not installed: pip install -r requirements/alfworld.txt")
    if not ALFWORLD.is_dir():
        pytest.skip(f"there are no ALFWorld games in {ALFWORLD}")
    with tarfile.open(ALFWORLD / "games.tar.xz") as packed:
        for member in packed:
            *_, task, trial, file = ("", "", *Path(member.name).parts)
            if file != "game.tw-pddl" or splits_of and task not in splits_of:
                continue
            content = packed.extractfile(member).read()
            for split in splits_of[task] if splits_of else ("train", "valid_seen", "valid_unseen"):
                path = folder / "json_2.1.1" / split / task / trial / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    return folder


@pytest.fixture(scope="session")
def _few_games(tmp_path_factory) -> tuple[Path, Path]:
    return unpack(tmp_path_factory.mktemp("alfworld"), FEW), tmp_path_factory.mktemp("translated")


@pytest.fixture
def few_games(_few_games, monkeypatch) -> str:
    """The folder of a few games, for `AlfWorld`. Their translations are kept for the session."""
    folder, translated = _few_games
    monkeypatch.setenv("RSPO_CACHE", str(translated))
    return str(folder)


@pytest.fixture
def sixty_games(tmp_path, monkeypatch) -> str:
    """The folder of sixty games, ten of each type, in every split."""
    monkeypatch.setenv("RSPO_CACHE", str(tmp_path / "translated"))
    return str(unpack(tmp_path / "alfworld"))
