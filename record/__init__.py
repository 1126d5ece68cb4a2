"""Input and output of a run: its command line, metrics, log, checkpoints, tables, curves and page."""
