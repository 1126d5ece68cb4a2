"""Where the tests have their tensors and models: on the CPU or, with RSPO_TEST_DEVICE=cuda, on a GPU."""

import os

DEVICE = os.environ.get("RSPO_TEST_DEVICE", "cpu")
LOOSER = 1 if DEVICE == "cpu" else 30  # a GPU takes other kernels, which round otherwise, for other shapes
