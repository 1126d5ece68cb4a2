"""The experiments of docs/RESULTS.md: `python -m reproduce NAME` remakes one from nothing."""
