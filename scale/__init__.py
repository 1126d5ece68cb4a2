"""Means to scale a run beyond one process and one device: ranks, environment workers, vLLM, a memory plan."""
