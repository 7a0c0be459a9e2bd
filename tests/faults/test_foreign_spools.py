"""What other users of the machine can put where spools are looked for: nothing of it is believed.

All attacks are planted at once, in several roots, and met by one `smdist recover` that looks for
spools and by one that is given their names. A genuine spool beside them is sent.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

import smdist.pytorch as smd
from smdist.errors import ConfigurationError
from smdist.identity import modes
from smdist.trials import create_trial
from smdist.workers.hook.buffer_location import choose_spool
from smdist.workers.spool.private_files import private_root
from smdist.workers.spool.spool import Entry, Spool
from smdist.workers.upload.process import uploader_command
from smdist.workers.upload.recover import find_spools
from tests.faults.audit import assert_in_run, audit
from tests.faults.launcher import REPOSITORY, Launcher, drained
from tests.support.torch_jobs import beside_waiting
from tests.support.uploader_rig import Job, leave_behind, read_store

OTHER = 65534  # another user
ELEMENTS = 100
SECRET = b"a secret of this user"
Digest = tuple[int, int, int, str]


def give_away(path: Path) -> None:
    os.chown(path, OTHER, OTHER, follow_symlinks=False)
    for entry in path.iterdir() if path.is_dir() and not path.is_symlink() else ():
        give_away(entry)


def replace(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@dataclass(frozen=True)
class Scene:
    """`root` holds the spools, `elsewhere` what is to be deleted, or copied to `loot`."""

    folder: Path

    def root(self, name: str = "root") -> Path:
        return self.folder / "roots" / name

    @property
    def loot(self) -> Path:
        return self.folder / "loot"

    @property
    def secret(self) -> Path:
        return self.folder / "elsewhere" / "secret"

    @property
    def precious(self) -> Path:
        return self.folder / "elsewhere" / "precious"

    def spool(self, name: str, root: str = "root", out_dir: Path | None = None) -> Spool:
        """One that looks like what a dead process left."""
        made = Job(
            root=str(self.root(root)),
            out_dir=str(out_dir or self.loot / name),
            overflow=str(self.folder / "disk"),
            elements=ELEMENTS,
        )
        session = hashlib.sha256(name.encode()).hexdigest()
        return leave_behind(made, steps=1, session=session)

    def tree(self) -> dict[str, Digest]:
        """All there is, with owner, mode, size and content."""
        found = {}
        for parent, folders, names in os.walk(self.folder):
            for path in (Path(parent, name) for name in (*folders, *names)):
                status = path.lstat()
                text = ""
                if stat.S_ISREG(status.st_mode):
                    text = hashlib.sha256(path.read_bytes()).hexdigest()
                where = str(path.relative_to(self.folder))
                found[where] = (status.st_uid, status.st_mode, status.st_size, text)
        return found


class Attack(NamedTuple):
    """`path`: what is refused; `says`: the reason that is given."""

    path: Path
    says: str


def overflow_is(spool: Spool, path: Path) -> None:
    info = msgspec.structs.replace(spool.info, overflow=str(path))
    (spool.path / "spool.json").write_bytes(msgspec.json.encode(info))


def linked(scene: Scene, name: str, target: Path) -> Attack:
    spool = scene.spool(f"linked {name}")
    replace(spool.path / name, target)
    return Attack(spool.path, f"{spool.path / name} is a link")


def hard_linked(scene: Scene, name: str) -> Attack:
    spool = scene.spool(f"hard linked {name}")
    (spool.path / name).unlink()
    other = scene.secret.with_name(f"secret for {name}")
    other.write_bytes(SECRET)
    os.link(other, spool.path / name)
    return Attack(spool.path, f"{spool.path / name} has a second name")


def strange(scene: Scene, name: str, make: Callable[[Path], None]) -> Attack:
    spool = scene.spool(f"{make.__name__} {name}")
    (spool.path / name).unlink()
    make(spool.path / name)
    return Attack(spool.path, f"{spool.path / name} has the wrong type")


def opened_up(scene: Scene, name: str, mode: int) -> Attack:
    spool = scene.spool(f"{mode:o} {name}")
    (spool.path / name).chmod(mode)
    return Attack(spool.path, f"is open to others (mode {mode:o})")


def given_away(scene: Scene, name: str) -> Attack:
    spool = scene.spool(f"given away {name}")
    give_away(spool.path / name)
    return Attack(spool.path, f"{spool.path / name} belongs to another user ({OTHER})")


def foreign_spool(scene: Scene) -> Attack:
    spool = scene.spool("foreign")
    give_away(spool.path)
    return Attack(spool.path, f"{spool.path} belongs to another user ({OTHER})")


def linked_spool(scene: Scene) -> Attack:
    spool = scene.spool("linked")
    spool.path.rename(scene.secret.with_name("spool"))
    spool.path.symlink_to(scene.secret.with_name("spool"))
    return Attack(spool.path, f"{spool.path} is a link")


def overflow_elsewhere(scene: Scene, deceptive: bool) -> Attack:
    spool = scene.spool(f"overflow elsewhere {deceptive}")
    target = scene.precious
    if deceptive:
        target = target.with_name(f"{spool.path.name}-overflow")
        shutil.copytree(scene.precious, target)
    overflow_is(spool, target)
    return Attack(spool.path, f"it names {target} as its own")


def linked_overflow(scene: Scene) -> Attack:
    spool = scene.spool("linked overflow")
    spool.make_overflow().rmdir()
    spool.overflow.symlink_to(scene.precious)
    return Attack(spool.path, f"{spool.overflow} is a link")


def foreign_overflow(scene: Scene) -> Attack:
    spool = scene.spool("foreign overflow")
    (spool.make_overflow() / "arena-1").write_bytes(b"x")
    give_away(spool.overflow)
    return Attack(spool.path, f"{spool.overflow} belongs to another user")


def root_of(scene: Scene, name: str, change: Callable[[Path], None], says: str) -> Attack:
    scene.spool(f"in a root that is {name}", root=name)
    root = private_root(scene.root(name))
    change(root)
    return Attack(root, f"{root} {says}")


def move_behind_a_link(root: Path) -> None:
    root.rename(root.with_name("moved"))
    root.symlink_to("moved")


ATTACKS: dict[str, Callable[[Scene], Attack]] = {
    **{
        f"linked {name}": lambda scene, name=name: linked(scene, name, scene.secret)  # type: ignore[misc]
        for name in ("arena-0", "journal-000000", "ack_page", "lock", "doorbell", "spool.json")
    },
    "linked to nowhere": lambda scene: linked(scene, "uploader.log", scene.secret.with_name("no")),
    "linked spool": linked_spool,
    "hard linked arena": lambda scene: hard_linked(scene, "arena-0"),
    "hard linked ack_page": lambda scene: hard_linked(scene, "ack_page"),
    **{
        f"{make.__name__} {name}": lambda scene, name=name, make=make: strange(scene, name, make)  # type: ignore[misc]
        for make in (os.mkfifo, os.mkdir)
        for name in ("arena-0", "journal-000000", "ack_page", "lock", "spool.json")
    },
    "group may write": lambda scene: opened_up(scene, "", 0o770),
    "others may write": lambda scene: opened_up(scene, "", 0o702),
    "group may write arena": lambda scene: opened_up(scene, "arena-0", 0o660),
    "others may write info": lambda scene: opened_up(scene, "spool.json", 0o606),
    "foreign arena": lambda scene: given_away(scene, "arena-0"),
    "foreign info": lambda scene: given_away(scene, "spool.json"),
    "foreign spool": foreign_spool,
    "overflow elsewhere": lambda scene: overflow_elsewhere(scene, False),
    "overflow elsewhere of the right name": lambda scene: overflow_elsewhere(scene, True),
    "linked overflow": linked_overflow,
    "foreign overflow": foreign_overflow,
    "foreign root": lambda scene: root_of(scene, "foreign", give_away, "belongs to another user"),
    "linked root": lambda scene: root_of(scene, "linked", move_behind_a_link, "is a link"),
    "open root": lambda scene: root_of(
        scene, "open", lambda r: r.chmod(0o750), "is open to others"
    ),
}

COMMAND = """
import os, sys
from pathlib import Path
from smdist.cli import main, recover
recover.default_roots = lambda: tuple(sorted(Path(os.environ["ROOTS"]).iterdir()))
main()
"""


def run_command(roots: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {"PYTHONPATH": str(REPOSITORY), "ROOTS": str(roots), "COLUMNS": "300"}
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "recover", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environ},
    )


class Met(NamedTuple):
    scene: Scene
    attacks: dict[str, Attack]
    before: dict[str, Digest]
    after: dict[str, Digest]
    done: subprocess.CompletedProcess[str]
    genuine: Spool


@pytest.fixture(scope="module", params=["looks for spools", "is given their names"])
def met(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Met:
    if os.geteuid() != 0:
        pytest.skip("giving folders to another user needs root")
    scene = Scene(tmp_path_factory.mktemp("foreign"))
    scene.precious.mkdir(parents=True)
    (scene.precious / "thesis").write_text("years of work")
    scene.secret.write_bytes(SECRET)
    attacks = {name: plant(scene) for name, plant in ATTACKS.items()}
    before = scene.tree()
    genuine = scene.spool("genuine", out_dir=scene.folder / "out")
    words = []
    if request.param == "is given their names":
        # A root that is not ours is met by the name of what hooks were given as spool_dir.
        paths = [
            a.path.parent if a.path.name.startswith("smdist-") else a.path for a in attacks.values()
        ]
        words = [str(path) for path in (*paths, genuine.path)]
    done = run_command(scene.root().parent, *words)
    return Met(scene, attacks, before, scene.tree(), done, genuine)


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_refused_and_said(met: Met, name: str) -> None:
    attack = met.attacks[name]
    lines = [line for line in met.done.stdout.splitlines() if str(attack.path) in line]
    assert [line for line in lines if attack.says in line], (lines, met.done)
    assert len(lines) == 1, "one line for each"
    assert lines[0].startswith(("refused: ", "failed: "))


def test_nothing_is_deleted_changed_or_copied(met: Met) -> None:
    """But for the genuine spool, which is sent."""
    kept = {
        path: found
        for path, found in met.after.items()
        if path.split("/")[0] != "out" and not path.startswith(".")
    }
    changed = {path for path in met.before if met.before[path] != kept.get(path)}
    # Folders that a spool came and went in.
    assert changed <= {"roots/root/" + private_root(met.scene.root()).name}
    assert set(kept) == set(met.before)
    assert not met.scene.loot.exists()
    assert SECRET not in met.done.stdout.encode()


def test_only_the_genuine_spool_is_sent_and_the_exit_code_says_so(met: Met) -> None:
    assert f"worker_0 -> {met.scene.folder / 'out'}: 1 step" in met.done.stdout, met.done
    assert not met.genuine.path.exists()
    assert (met.done.returncode, met.done.stderr) == (1, "")
    assert sorted(read_store(met.scene.folder / "out", ELEMENTS).raw) == [0]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    if os.geteuid() != 0:
        pytest.skip("giving folders to another user needs root")
    scene = Scene(tmp_path)
    scene.secret.parent.mkdir()
    scene.secret.write_bytes(SECRET)
    return scene


def test_a_rejected_root_is_reported_alone_and_beside_a_valid_one(scene: Scene) -> None:
    attack = ATTACKS["foreign root"](scene)
    genuine = scene.spool("genuine", out_dir=scene.folder / "out")
    for found in ("worker_0 -> ", "nothing to recover: "):
        done = run_command(scene.root().parent)
        refused, told = filter(None, done.stdout.splitlines())
        assert attack.says in refused
        assert told.startswith(found)
        assert (done.returncode, genuine.path.exists()) == (1, False)


# -- beside the command ----------------------------------------------------------------------------


def test_an_uploader_sends_nothing_from_such_a_spool(scene: Scene) -> None:
    spool = scene.spool("linked arena")
    replace(spool.path / "arena-0", scene.secret)
    before = scene.tree()
    command = uploader_command(spool, sys.executable)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert f"{spool.path / 'arena-0'} is a link" in done.stderr
    assert scene.tree() == before


def test_what_another_user_left_is_neither_an_elder_nor_swept(scene: Scene) -> None:
    root = scene.root()
    earlier, leftover, mine = (scene.spool(name) for name in ("earlier", "leftover", "mine"))
    entry = Entry(0.0, False, "none", None)
    for started, spool in enumerate((earlier, mine)):
        session = msgspec.structs.replace(spool.info.session, started=float(started))
        info = msgspec.structs.replace(spool.info, session=session, entry=entry)
        (spool.path / "spool.json").write_bytes(msgspec.json.encode(info))
    (leftover.path / "spool.json").unlink()
    mine = Spool.open(mine.path)
    assert [spool.path for spool in mine.earlier_spools()] == [earlier.path]
    give_away(earlier.path)
    give_away(leftover.path)
    assert mine.earlier_spools() == []
    assert find_spools([root]) == [mine.path]
    scene.spool("next")  # sweeps
    assert (leftover.path / "journal-000000").exists()


# -- a job whose place is taken ---------------------------------------------------------------------

TAKEN = """
import smdist.workers.hook.buffer_location as memory
from pathlib import Path
memory._MEMORY = Path(order.arguments["memory"])
train(order)
"""


def test_a_job_whose_folder_in_memory_is_taken_saves_everything(
    launcher: Launcher, scene: Scene, tmp_path: Path
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    for folder in (memory, private_root(memory), disk):
        folder.mkdir()
    give_away(private_root(memory))
    started = launcher.start(
        tmp_path / "rank",
        TAKEN,
        {"TMPDIR": str(disk)},
        steps=3,
        memory=str(memory),
        hook={"out_dir": str(tmp_path / "out"), "linger_s": 0.01},
    )
    assert started.wait() == 0, repr(started)
    drained(disk)
    said = beside_waiting(started.stderr.splitlines())
    assert len(said) == 1, said
    cause = f"{private_root(memory)} belongs to another user ({OTHER})"
    for words in (cause, f"is in {disk} instead", "Have it removed, or set SMDIST_SPOOL_DIR"):
        assert words in said[0]
    assert not list(private_root(memory).iterdir())
    audit(tmp_path / "out")
    with create_trial(tmp_path / "out") as trial:
        assert trial.steps(modes.TRAIN) == list(range(3))
        assert_in_run(trial, started, 0, started.evidence())


def test_a_disk_where_the_folder_is_taken_is_passed_over(scene: Scene, tmp_path: Path) -> None:
    private_root(tmp_path).mkdir()
    give_away(private_root(tmp_path))
    environ = {"TMPDIR": str(tmp_path)}
    assert choose_spool(1 << 20, environ, lambda _: 0).root != tmp_path
    shutil.rmtree(private_root(tmp_path))
    assert choose_spool(1 << 20, environ, lambda _: 0).root == tmp_path


@pytest.mark.parametrize("by_name", [True, False])
def test_a_hook_rejects_a_spool_dir_whose_private_folder_is_foreign(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    root = scene.root()
    private_root(root).mkdir(parents=True)
    give_away(private_root(root))
    given = {"spool_dir": root} if by_name else {}
    if not by_name:
        monkeypatch.setenv("SMDIST_SPOOL_DIR", str(root))
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        smd.Hook(tmp_path / "out", **given)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


# -- a job whose working directory is gone ---------------------------------------------------------

ELSEWHERE = """
import os
os.mkdir(order.arguments["work"])
os.chdir(order.arguments["work"])
os.rmdir(order.arguments["work"])
train(order)
"""


def test_a_job_whose_working_directory_was_removed_is_stored(
    launcher: Launcher, tmp_path: Path
) -> None:
    out_dir, root = tmp_path / "out", tmp_path / "spools"
    hook = {"out_dir": str(out_dir), "spool_dir": str(root), "linger_s": 0.01}
    started = launcher.start(
        tmp_path / "rank", ELSEWHERE, steps=3, work=str(tmp_path / "work"), hook=hook
    )
    assert started.wait() == 0, repr(started)
    drained(root)
    assert "uploader" not in started.stderr, started.stderr
    audit(out_dir)
    with create_trial(out_dir) as trial:
        assert_in_run(trial, started, 0, started.evidence())
