"""A place as one process finds it, for another one in another environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from smdist.storage import pin_url

pytest.importorskip("aiobotocore")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return monkeypatch


def test_what_the_environment_says_is_written_out(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("AWS_ENDPOINT_URL", "http://here:9000")
    url = pin_url("s3://bucket/run")
    assert url == "s3://bucket/run?endpoint_url=http://here:9000&region=eu-west-1"
    environment.setenv("AWS_ENDPOINT_URL", "http://there:9000")
    environment.setenv("AWS_DEFAULT_REGION", "us-west-2")
    assert pin_url(url) == url


def test_aws_itself_stays_aws(environment: pytest.MonkeyPatch) -> None:
    import botocore.session

    from smdist.storage.s3.client import client_settings
    from smdist.storage.s3.options import parse_s3_url

    url = pin_url("s3://bucket/run")
    environment.setenv("AWS_ENDPOINT_URL", "http://there:9000")
    assert pin_url(url) == url

    session = botocore.session.Session()
    assert client_settings(parse_s3_url(url), session).is_aws


def test_a_directory_is_the_same_from_every_other(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.chdir(tmp_path)
    assert pin_url("run") == str(tmp_path / "run")
    assert pin_url("file:///run") == "file:///run"
