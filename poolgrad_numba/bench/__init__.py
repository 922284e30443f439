"""Timing: the speed cases, who runs them, turns taken inside one process, and comparison of two such runs."""
