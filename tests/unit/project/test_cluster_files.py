"""What cluster/ says is understood by those it is said to: Ray's launcher, Ray's and our commands.

Ray checks its launcher's files with a schema of its own and fills in defaults, as `ray up` does
before it asks a provider for anything. Nobody here has the definitions of KubeRay: its objects are
checked for what the operator needs.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from smdist import __version__
from smdist.cli.app import app

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "cluster"
LAUNCHED = ("aws.yaml", "on-premise.yaml")
README = (CLUSTER / "README.md").read_text()


def load(name: str) -> dict[str, Any]:
    (one,) = documents(name)
    return one


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTER / name).read_text()))


def kuberay(name: str, kind: str) -> dict[str, Any]:
    (found,) = (one for one in documents(f"kuberay/{name}") if one["kind"] == kind)
    return found


# -- commands ------------------------------------------------------------------------------------


def shell_lines() -> Iterator[tuple[str, str]]:
    """File and command, for every command of smdist or Ray that somebody is told to run."""
    for name in LAUNCHED:
        config = load(name)
        for key, lines in config.items():
            if key.endswith("_commands"):
                yield from ((name, part) for line in lines for part in re.split(r";|&&", line))
    yield "kuberay/rayjob.yaml", kuberay("rayjob.yaml", "RayJob")["spec"]["entrypoint"]
    for block in re.findall(r"```(?:console|sh)\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield "README.md", line.partition(" #")[0]


def commands(program: str) -> list[tuple[str, str]]:
    """What follows a program's name, also when another one is told to run it."""
    found = []
    for name, line in shell_lines():
        words = shlex.split(line)
        for place, word in enumerate(words):
            if Path(word).name == program and (place == 0 or words[place - 1] in ("--", "exec")):
                found.append((name, shlex.join(words[place + 1 :])))
            first, _, rest = word.partition(" ")
            if rest and Path(first).name == program:
                found.append((name, rest))
    return found


@pytest.mark.parametrize(("name", "line"), commands("smdist"))
def test_our_commands_exist(name: str, line: str) -> None:
    command: Any = get_command(app)
    words = shlex.split(line)
    context = command.make_context("smdist", [], resilient_parsing=True)
    while getattr(command, "commands", None):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words, parent=context)


@pytest.mark.parametrize(("name", "line"), commands("ray"))
def test_ray_takes_its_commands(name: str, line: str) -> None:
    from ray.scripts.scripts import cli

    command: Any = cli
    words = shlex.split(line)
    while getattr(command, "commands", None):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)


def test_every_way_starts_a_coordinator() -> None:
    started = {name for name, line in commands("smdist") if line.startswith("coordinator start")}
    assert started == {*LAUNCHED, "kuberay/rayjob.yaml", "README.md"}


# -- Ray's launcher ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHED)
def test_launcher_accepts(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(load(name))
    validate_config(config)
    assert config["head_node_type"] in config["available_node_types"]


@pytest.mark.parametrize("name", LAUNCHED)
def test_launcher_refuses_a_misspelt_key(name: str) -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = {**load(name), "head_start_commands": []}
    with pytest.raises(ValidationError):
        validate_config(prepare_config(config))


@pytest.mark.parametrize("name", LAUNCHED)
def test_only_ssh_is_open(name: str) -> None:
    """A security group that Ray makes is open to SSH from everywhere, whatever is said of it."""
    config = load(name)
    assert "security_group" not in config["provider"]
    for one in config.get("available_node_types", {}).values():
        assert one["node_config"]["SecurityGroupIds"]
    starts = [line for line in config["head_start_ray_commands"] if "ray start" in line]
    assert len(starts) == 1
    assert "--dashboard-host=127.0.0.1" in starts[0]


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_wheel_is_installed_from_where_it_is_copied(name: str) -> None:
    config = load(name)
    ((target, source),) = config["file_mounts"].items()
    assert source == "dist"
    assert any(f"{target}/smdist-*.whl" in line for line in config["setup_commands"])
    assert "pip wheel --no-deps --wheel-dir dist ." in README


# -- KubeRay -------------------------------------------------------------------------------------


def cluster_specs() -> dict[str, dict[str, Any]]:
    return {
        "raycluster.yaml": kuberay("raycluster.yaml", "RayCluster")["spec"],
        "rayjob.yaml": kuberay("rayjob.yaml", "RayJob")["spec"]["rayClusterSpec"],
    }


def groups() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{name}-{number}", group)
        for name, spec in cluster_specs().items()
        for number, group in enumerate([spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])])
    ]


@pytest.mark.parametrize("name", ["raycluster.yaml", "rayjob.yaml"])
def test_objects_have_a_kind_and_a_name(name: str) -> None:
    for one in documents(f"kuberay/{name}"):
        assert re.fullmatch(r"[a-z0-9.]*/?v1", one["apiVersion"])
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", one["metadata"]["name"])
        assert one["kind"] in {"ServiceAccount", "NetworkPolicy", "RayCluster", "RayJob"}
        if one["kind"].startswith("Ray"):
            assert one["apiVersion"] == "ray.io/v1"


@pytest.mark.parametrize(("name", "group"), groups())
def test_a_group_can_be_scheduled(name: str, group: dict[str, Any]) -> None:
    from ray.scripts.scripts import start

    (container,) = group["template"]["spec"]["containers"]
    assert container["image"]
    assert {"requests", "limits"} <= set(container["resources"])
    account = kuberay("raycluster.yaml", "ServiceAccount")["metadata"]["name"]
    assert group["template"]["spec"]["serviceAccountName"] == account
    known = {option.lstrip("-") for parameter in start.params for option in parameter.opts}
    for key, text in group["rayStartParams"].items():
        assert key in known, f"ray start has no --{key}"
        assert isinstance(text, str), f"{key}: the operator wants text"


@pytest.mark.parametrize(("name", "group"), groups())
def test_the_policy_is_for_every_pod(name: str, group: dict[str, Any]) -> None:
    policy = kuberay("raycluster.yaml", "NetworkPolicy")["spec"]
    wanted = policy["podSelector"]["matchLabels"]
    assert wanted.items() <= group["template"]["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]


def test_a_head_declares_its_ports() -> None:
    for spec in cluster_specs().values():
        (container,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


def test_job_and_cluster_have_the_same_head() -> None:
    specs = cluster_specs()
    assert specs["raycluster.yaml"]["headGroupSpec"] == specs["rayjob.yaml"]["headGroupSpec"]


def test_the_job_stays_and_starts_again() -> None:
    spec = kuberay("rayjob.yaml", "RayJob")["spec"]
    assert "--follow" in spec["entrypoint"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["backoffLimit"] > 0


# -- versions ------------------------------------------------------------------------------------


def test_one_ray_everywhere() -> None:
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints/main.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    said = {spec["rayVersion"] for spec in cluster_specs().values()}
    for path in (*(CLUSTER / name for name in LAUNCHED), CLUSTER / "Dockerfile"):
        said |= set(
            re.findall(r"(?:rayproject/ray:|\"ray\[default\]==|ARG RAY=)([\d.]+)", path.read_text())
        )
    assert said == {pinned[1]}


def test_images_are_of_this_version() -> None:
    tags = set[str]()
    for path in CLUSTER.rglob("*"):
        if path.is_file():
            tags |= set(re.findall(r"smdist-ray:([\w.]+)", path.read_text()))
    assert tags == {__version__}


# -- the image -----------------------------------------------------------------------------------


def test_the_image_is_built_from_what_is_there() -> None:
    text = (CLUSTER / "Dockerfile").read_text()
    sources = [
        word
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)
        for word in line.split()[:-1]
    ]
    assert set(sources) == {
        *("pyproject.toml", "setup.py", "README.md", "LICENSE"),
        *("smdist", "workers", "coordination"),
    }
    ignored = (CLUSTER / "Dockerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == set(sources)
    assert all((ROOT / source).exists() for source in sources)
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?", text, re.MULTILINE)
    assert [name for _, name in stages] == ["wheel", ""]
    assert set(re.findall(r"COPY --from=(\w+)", text)) == {"wheel"}


@pytest.mark.slow
def test_the_image_builds_a_wheel_from_its_sources(tmp_path: Path) -> None:
    """The wheel's stage, without a container: what is copied there is enough."""
    import shutil

    text = (CLUSTER / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            path = ROOT / source
            if path.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(path, tmp_path / source, symlinks=True, ignore=ignore)
            else:
                shutil.copy(path, tmp_path / source)
    command = "pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ."
    assert f"RUN {command}" in text
    words = command.replace("/wheels", str(tmp_path / "wheels")).split()
    done = subprocess.run(
        [sys.executable, "-m", *words, "--no-build-isolation"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    assert wheel.name.startswith(f"smdist-{__version__}-")
