"""Fresh Debian machines, in which an ordinary user runs the quickstart: `make test-machines`, as root.

machines.py lists them, debian.py builds them, quickstart.py runs the commands in one, and __main__.py prints the table.
"""
