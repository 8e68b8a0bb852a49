"""The engine's loop: receive, step, tell; the plain and the overlapped step, and what a step commits."""
