"""Storage backends of a store: a local or shared folder, or any fsspec file system (`s3://`).

Start with backend.py, the protocol of both. Names are relative to the store's root, separated by slashes. `create` is exclusive
on every backend (a hard link on a folder, a conditional write on S3); locks need nothing else. A failed read is retried, then
raised: a file is reported as absent only if the backend says that it does not exist. Imports `parallel` and `profiles`.
"""
