"""What a run reads and writes: its command line, metrics, log, checkpoints, tables and curves."""
