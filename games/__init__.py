"""The games: engines, translations and scripted players, each without a dependency on the method."""
