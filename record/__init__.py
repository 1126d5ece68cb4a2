"""What a run writes and reads back: metrics, logs, checkpoints, models, tables and curves."""
