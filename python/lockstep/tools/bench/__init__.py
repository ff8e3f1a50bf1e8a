"""``lockstep bench``: did the second device help, where did the rest go, and how fast do the ranks reduce."""
