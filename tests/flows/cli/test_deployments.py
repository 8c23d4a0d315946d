"""Registration of deployments on a server that may have them already."""

import os

import pytest
import yaml

from flows.cli.deployments import count_unregistered, deploy, named, query
from flows.registration import register_pool

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path):
    """A checkout with one deployment."""
    deployment = {"name": "only", "entrypoint": "flows.fleet.fleet", "work_pool": {"name": "trainshed"}}
    file = tmp_path / "prefect.yaml"
    file.write_text(yaml.safe_dump({"deployments": [{**deployment, "tags": ["first"]}]}))
    return tmp_path


def test_deployments_are_registered_again_only_if_they_or_the_servers_have_changed(prefect_server, home):
    register_pool()
    log, settings = home / "deploy.log", {"env": {**os.environ, "PREFECT_API_URL": prefect_server}}

    def registers() -> bool:
        log.write_text("")
        assert deploy(home, prefect_server, log, settings) == 0
        assert count_unregistered(prefect_server, home) == 0
        return "' successfully " in log.read_text()

    assert registers()
    assert not registers()
    (registered,) = query(f"{prefect_server}/deployments/filter", {"deployments": named("only")})
    query(f"{prefect_server}/deployments/{registered['id']}", {}, "DELETE")
    assert registers()
    file = home / "prefect.yaml"
    file.write_text(file.read_text().replace("first", "second"))
    assert registers()
    assert not registers()
