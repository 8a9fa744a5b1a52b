"""What a run needs, how long it takes and what it costs, before anything is sent. Pure: spec and
catalog in, Plan out; no torch, but for a child process that traces memory (trace.py)."""
