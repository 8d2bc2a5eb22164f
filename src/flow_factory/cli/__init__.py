"""The command line: one file per command group. Heavy modules load inside the commands that need them."""
