"""Run a step, get a Trace: who allocates, saves and frees what, where and when."""
