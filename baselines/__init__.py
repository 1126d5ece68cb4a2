"""Methods to compare RSPO with that are not in rspo.py: SPEAR."""
