"""Paths of a recipe are checked before anything is loaded from them."""

from pathlib import Path

import pytest

from mfwrap.recipes.data.places import (
    check_place,
    not_a_file,
    not_a_folder,
    resolve_package,
    similar_folder,
)
from support.hub import client_of, serving
from support.versions import needs


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a package with a folder, and a folder outside the package."""
    (tmp_path / "outside" / "inner").mkdir(parents=True)
    package = tmp_path / "made_for_this_test"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "link").symlink_to(tmp_path / "outside")
    monkeypatch.syspath_prepend(tmp_path)
    return package


def test_a_folder_of_a_package(package):
    """A folder inside the package is found, without importing the package."""
    found = resolve_package("path", "package:made_for_this_test/model")

    assert found == str(package / "model")
    assert resolve_package("path", "org/name") == "org/name"


@pytest.mark.parametrize(
    "inner", ["../outside", "model/../../outside", "link", "link/inner", "ABS"]
)
def test_a_package_is_not_left(package, inner):
    """A folder outside the package is refused, however the name leads there."""
    inner = inner.replace("ABS", str(package.parent / "outside"))
    with pytest.raises(ValueError, match="`path` must be a folder inside the package, got "):
        resolve_package("path", f"package:made_for_this_test/{inner}")


@pytest.mark.parametrize("name", ["/none", "./none", "~/none", "a/b/c", "a b", "x" * 300, "FILE"])
def test_what_is_no_place(tmp_path, name):
    """A name that is neither a folder nor has the form of a name on the hub is refused."""
    (tmp_path / "file").touch()
    name = name.replace("FILE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="`path` must be an existing folder, or a name on the hub"):
        check_place("path", name, ("a.json",), "a folder of the test")


def test_the_model_of_a_run():
    """Where a run would write its model, the error has the command."""
    says = r"got 'runs/causal_lm/model'; the run of the recipe `causal_lm` writes it$"
    with pytest.raises(ValueError, match=says):
        check_place("path", "runs/causal_lm/model", ("a.json",), "a test")


def test_a_file_in_place_of_its_folder(tmp_path, monkeypatch):
    """It is no name on the hub, although it has the form of one; nor is a home folder replaced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"got 'mine/model.safetensors'; this is a file, name its"):
        check_place("path", "mine/model.safetensors", ("config.json",), "a model folder")
    with pytest.raises(ValueError, match=r"got '~/mine'; `~` is not replaced here, write '/home/"):
        check_place("path", "~/mine", ("config.json",), "a model folder")


def test_a_folder_must_have_its_files(tmp_path):
    """A folder needs one of the files; a name of the hub's form is accepted."""
    says = "got the folder '/etc' without a.json or b.json; if it should have one, download or copy"
    with pytest.raises(ValueError, match=says):
        check_place("path", "/etc", ("a.json", "b.json"), "a test")

    (tmp_path / "b.json").touch()
    check_place("path", str(tmp_path), ("a.json", "b.json"), "a test")
    check_place("path", "org/name", ("a.json", "b.json"), "a test")


def test_an_empty_folder(tmp_path):
    """An empty folder, such as that of a download which has failed, is called empty."""
    with pytest.raises(ValueError, match=r"without config\.json; the folder is empty$"):
        check_place("path", str(tmp_path), ("config.json",), "a model folder")


def test_where_the_model_is(tmp_path):
    """A folder of a run, of a cache or of GGUF is refused with what to name instead."""
    for name in ("run/checkpoint-9", "run/checkpoint-10", "run/runs"):
        (tmp_path / name).mkdir(parents=True)
        if "checkpoint" in name:
            (tmp_path / name / "config.json").touch()
    says = (
        rf"the folder '.*run' without config\.json; did you mean '{tmp_path}/run/checkpoint-10'\?$"
    )
    with pytest.raises(ValueError, match=says):
        check_place("path", str(tmp_path / "run"), ("config.json",), "a model folder")

    for name in "abcdefgh":
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").touch()
    with pytest.raises(ValueError, match=r"did you mean one of '.*a', '.*b', .*/f' and 2 more\?$"):
        check_place("path", str(tmp_path / "models"), ("config.json",), "a model folder")

    (tmp_path / "small").mkdir()
    (tmp_path / "small/model.Q4.gguf").touch()
    with pytest.raises(ValueError, match=r"without config\.json; weights in GGUF are for inf"):
        check_place("path", str(tmp_path / "small"), ("config.json",), "a model folder")
    with pytest.raises(ValueError, match=r"\.gguf'; this is a file, name its folder$"):
        check_place("path", str(tmp_path / "small/model.Q4.gguf"), ("config.json",), "a model")


def test_a_similar_name(tmp_path, monkeypatch):
    """A name that is no folder here, or no file, may be a misspelt one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/my_model").mkdir(parents=True)

    says = "there is no folder 'models/my_modl' here; did you mean 'models/my_model'?"
    assert not_a_folder("models/my_modl") == says
    assert not_a_folder("org/name") == "there is no folder 'org/name' here"
    assert similar_folder("models/my_modl", ["config.json"]) is None
    (tmp_path / "models/my_model/config.json").touch()
    assert similar_folder("models/my_modl", ["config.json"]) == "models/my_model"
    assert similar_folder("models/my_model", ["config.json"]) is None

    (tmp_path / "models/rows.csv").touch()
    says = "there is no file 'models/row.csv' here; did you mean 'models/rows.csv'?"
    assert not_a_file("models/row.csv") == says
    assert not_a_file("models/my_modl") == "there is no file 'models/my_modl' here"


def test_a_similar_path(tmp_path, monkeypatch):
    """A folder in the path may be misspelt, too, and what has the same parent is not similar."""
    monkeypatch.chdir(tmp_path)
    for name in ("output/checkpoint-10", "output/checkpoint-200", "output/logs"):
        Path(name).mkdir(parents=True)
    Path("output/checkpoint-10/config.json").touch()

    meant = "did you mean 'output/checkpoint-10'?"
    for name in ("outptu/checkpoint-10", "./outptu/checkpoint-10", "output/chekpoint-10"):
        assert not_a_folder(name) == f"there is no folder {name!r} here; {meant}"
        assert similar_folder(name, ["config.json"]) == "output/checkpoint-10"
    for name in ("output/x", "no/output", f"{tmp_path}/x"):
        assert not_a_folder(name) == f"there is no folder {name!r} here"
    assert not_a_file("outptu/checkpoint-10/confg.json").endswith("-10/config.json'?")


@pytest.mark.parametrize("given", ["./my_modl", "{}/my_modl", "a/../my_modl", "./no"])
def test_a_similar_path_that_no_model_on_the_hub_has(tmp_path, monkeypatch, given):
    """A path that is no name on the hub is refused with the folder that is meant."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "my_model"):
        Path(name).mkdir()
    Path("my_model/config.json").touch()
    name = given.format(tmp_path)

    with pytest.raises(ValueError, match="must be an existing folder, or a name on") as caught:
        check_place("path", name, ("config.json",), "a model folder")

    meant = "" if given == "./no" else f"; did you mean {str(Path(name).with_name('my_model'))!r}?"
    assert str(caught.value).endswith(f"got {name!r}{meant}")


@needs("huggingface_hub", "1.0", "a client that a test can lead elsewhere")
@pytest.mark.parametrize("name", ["goood", "models/goood", "models/Tiny-3B-chat"])
def test_a_name_similar_to_a_folder_is_looked_up_on_the_hub(tmp_path, monkeypatch, name):
    """It may be a slip or a model on the hub, so the hub is asked, once, and must know it."""
    monkeypatch.chdir(tmp_path)
    for folder in ("models/good", "models/Tiny-1B-chat", "good"):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").touch()
    asked = f"HEAD /{name}/resolve/main/config.json"
    with serving() as hub, client_of(hub.url):
        check_place("path", name, ("config.json",), "a model folder")
        hub.refuses = lambda _: True
        with pytest.raises(
            ValueError,
            match=r"does not answer \(\w+; check the connection\); did",
        ):
            check_place("path", name, ("config.json",), "a model folder")
        check_place("path", "other", ("config.json",), "a model folder")
        assert hub.requests == [asked, asked]

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"does not answer \(OfflineModeIsEnabled; check .*\); did"
    ):
        check_place("path", name, ("config.json",), "a model folder")
    cached = tmp_path / f"hub/models--{name.replace('/', '--')}"
    for made in (cached / "refs", cached / "snapshots/1"):
        made.mkdir(parents=True)
    (cached / "refs/main").write_text("1")
    (cached / "snapshots/1/config.json").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    check_place("path", name, ("config.json",), "a model folder")
