"""`ray up cluster/aws.yaml` against an imitation of EC2, up to where it would log in to the node."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.s3 import Server, start_moto

pytestmark = [pytest.mark.ray, pytest.mark.s3]

ROOT = Path(__file__).parents[2]

# What `ray up` does with the file: completed and checked by schema, then keys, subnets, images, and
# the instance itself.
CODE = """
import json, sys, yaml
from pathlib import Path
from ray.autoscaler._private.commands import _bootstrap_config
from ray.autoscaler._private.providers import _get_node_provider
from ray.autoscaler.tags import NODE_KIND_HEAD, TAG_RAY_NODE_KIND, TAG_RAY_NODE_NAME
config = _bootstrap_config(yaml.safe_load(Path(sys.argv[1]).read_text()), no_config_cache=True)
provider = _get_node_provider(config["provider"], config["cluster_name"])
node = config["available_node_types"][config["head_node_type"]]["node_config"]
tags = {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_NODE_NAME: "head"}
provider.create_node(node, tags, 1)
Path(sys.argv[2]).write_text(json.dumps(config))
"""


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="module")
def config(cloud: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("home")
    (home / ".ssh").mkdir()
    cloud.client(service="iam").create_instance_profile(InstanceProfileName="smdist-coordinator")
    ec2 = cloud.client(service="ec2")
    own = ec2.create_security_group(GroupName="smdist-coordinator", Description="ours")["GroupId"]
    text = (ROOT / "cluster" / "aws.yaml").read_text()
    (home / "aws.yaml").write_text(re.sub(r"\bsg-[0-9a-f]+", own, text))
    made = home / "config.json"
    done = subprocess.run(
        [sys.executable, "-c", CODE, home / "aws.yaml", made],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),  # Ray puts the key it makes there
            "AWS_ENDPOINT_URL": cloud.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
        },
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(made.read_text())
    return found


def test_what_nodes_have_is_known(config: dict[str, Any]) -> None:
    assert {name: one["resources"]["CPU"] for name, one in config["available_node_types"].items()}
    assert config["auth"]["ssh_private_key"].endswith(".pem")


def test_the_head_is_as_it_was_asked_for(config: dict[str, Any], cloud: Server) -> None:
    (reservation,) = cloud.client(service="ec2").describe_instances()["Reservations"]
    (instance,) = reservation["Instances"]
    assert instance["InstanceType"] == "m6i.large"
    assert instance["IamInstanceProfile"]["Arn"].endswith("/smdist-coordinator")
    assert instance["MetadataOptions"]["HttpTokens"] == "required"
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
    assert tags["ray-cluster-name"] == "smdist"


def test_ray_makes_no_security_group(config: dict[str, Any], cloud: Server) -> None:
    """It would let in SSH from everywhere."""
    ec2 = cloud.client(service="ec2")
    (instance,) = ec2.describe_instances()["Reservations"][0]["Instances"]
    (own,) = instance["SecurityGroups"]
    assert own["GroupName"] == "smdist-coordinator"
    (group,) = ec2.describe_security_groups(GroupIds=[own["GroupId"]])["SecurityGroups"]
    assert group["IpPermissions"] == [], "Ray has opened it"
