"""What the README and the documents say is so: their code compiles, names exist, defaults are real."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from tests.support.document_names import check_names, python_blocks

REPOSITORY = Path(__file__).parents[3]
README = REPOSITORY / "README.md"
DOCUMENTS = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
# The other one is for tests/tensorflow.
ABOUT_TORCH = [document for document in DOCUMENTS if document.name != "tensorflow.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_code_compiles(document: Path) -> None:
    for block in python_blocks(document):
        compile(block, str(document), "exec")


def test_the_readme_has_code() -> None:
    assert len(python_blocks(README)) >= 3


@pytest.mark.torch
@pytest.mark.parametrize("document", ABOUT_TORCH, ids=lambda path: path.name)
def test_names_in_it_exist(document: Path) -> None:
    check_names(document, importlib.import_module("smdist.pytorch"), "Hook")


def option_rows() -> dict[str, str]:
    """Option -> default, as the table says."""
    table = README.read_text().partition("\n## Options\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", table, re.MULTILINE))


@pytest.mark.torch
def test_options_and_defaults_are_those_of_the_constructor() -> None:
    hook = importlib.import_module("smdist.pytorch").Hook
    parameters = inspect.signature(hook).parameters
    rows = option_rows()
    assert list(rows) == list(parameters), "all options, in the order of the constructor"
    for name, said in rows.items():
        default = parameters[name].default
        if default is inspect.Parameter.empty:
            assert said == "required", name
        else:
            assert ast.literal_eval(said.strip("`")) == default, name


def test_defaults_told_in_words_are_those_of_the_uploader() -> None:
    from smdist.config.save_config import SaveConfig
    from smdist.workers.spool.spool import UploadOptions

    text, upload = README.read_text(), UploadOptions()
    assert f"none given: {upload.segment_bytes >> 20} MiB" in text
    assert f"none given: {upload.linger_s:g} s" in text
    assert f"none given: {upload.drain_deadline_s:g} s" in text
    assert f"none given: every {SaveConfig().save_interval}th step" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = (document.parent / path) if path else document
        assert linked.exists(), f"{document.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
            assert anchor in anchors, f"{document.name}: {target}"


def test_the_test_command_is_make_test() -> None:
    assert re.search(r"^make test\b", README.read_text(), re.MULTILINE)
    assert re.search(r"^test:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)


def test_environment_variables_are_all_listed() -> None:
    used: set[str] = set()
    for folder in ("smdist", "workers", "coordination"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            used |= set(
                re.findall(r"\"((?:USE_)?SMD(?:IST|EBUG)(?:_[A-Z_]+)?)\"", path.read_text())
            )
    told = (REPOSITORY / "docs" / "limits.md").read_text()
    assert used, "found none: is the pattern right?"
    assert {name for name in used if name not in told} == set()


def test_the_format_names_every_key_of_a_run() -> None:
    from smdist.format import manifest

    keys = re.findall(r"^    ([\w<]\S*\.\w+)  ", manifest.__doc__ or "", re.MULTILINE)
    assert len(keys) >= 7
    told = (REPOSITORY / "docs" / "format.md").read_text()
    assert [key for key in keys if key not in told] == []


@pytest.mark.torch
def test_what_json_spells_in_another_way_is_told() -> None:
    from smdist.config.parameters import Scope, keys_in

    hook = importlib.import_module("smdist.pytorch").Hook
    python, in_json = set(inspect.signature(hook).parameters), set(keys_in(Scope.HOOK))
    guide = (REPOSITORY / "docs" / "guide.md").read_text()
    told = guide.partition("with these exceptions:")[2].partition("\n`train.")[0]
    plain = {key for key in in_json if "." not in key}
    assert {name for name in python ^ plain if f"`{name}`" not in told} == set()
    assert {name for name in python & plain if f"`{name}`" in told} == set()
