"""Not part of RSPO: the tiny model, its warm start and the toy world, which show the method on a CPU."""
