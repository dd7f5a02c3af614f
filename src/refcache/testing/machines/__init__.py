"""The Hypothesis state machine of each suite: thin rules over a driver of the oracle."""
