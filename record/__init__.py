<<<<<<< HEAD
"""What a run reads and writes: its command line, metrics, log, checkpoints, tables and curves."""
=======
"""What a run writes and reads back: metrics, logs, checkpoints, models, tables and curves."""
>>>>>>> train
