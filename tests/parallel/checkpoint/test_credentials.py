"""S3 clients take over credentials that are renewed during a run."""

import s3fs

from parallel.checkpoint.locations import filesystem


def test_clients_use_the_session_token_that_replaced_theirs(tmp_path, monkeypatch):
    credentials = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", "/missing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")

    def renew(token: str) -> None:
        values = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "aws_session_token": token}
        lines = "".join(f"{name} = {value}\n" for name, value in values.items())
        credentials.write_text(f"[default]\n{lines}")

    s3fs.S3FileSystem.clear_instance_cache()
    renew("first")
    files, root = filesystem("s3://bucket/a")
    assert "token=first" in files.sign(root)
    renew("second-token")
    assert "token=first" in files.sign(root)
    assert filesystem("s3://bucket/a") == (files, root)
    assert "token=second-token" in files.sign(root)
    s3fs.S3FileSystem.clear_instance_cache()
