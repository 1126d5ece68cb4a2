"""What a run writes and reads back: metrics, logs, checkpoints, tables and curves."""
