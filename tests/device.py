"""The device of the tests' tensors and models: the CPU or, with RSPO_TEST_DEVICE=cuda, a GPU."""

import os

DEVICE = os.environ.get("RSPO_TEST_DEVICE", "cpu")
LOOSER = 1 if DEVICE == "cpu" else 30  # on a GPU, rounding depends on the shapes
