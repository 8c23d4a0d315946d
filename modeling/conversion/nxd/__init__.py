"""NxD checkpoint shards: read as weights like any other format, and written for NxD's own programs.

Start at `files.py`. `layout.py` defines which rank holds which part of a tensor, `experts.py` how experts are stored. Imports
`modeling.conversion`, `parallel` and `profiles`.
"""
