"""One file per skill: its problems, how it is demonstrated, and how an attempt at it is rewarded."""
