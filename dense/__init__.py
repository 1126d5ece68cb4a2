"""Dense rewards besides the step reward model: progress, novelty, and an implicit process reward."""
