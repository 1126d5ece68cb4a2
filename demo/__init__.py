"""What a CPU needs to show the method and is no part of it: a tiny model and its warm start."""
