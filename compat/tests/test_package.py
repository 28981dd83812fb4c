"""The package as a whole: light, honest about what it has not, and never imported by slime_core."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import slime
from slime import _missing, _others

ROOT = Path(__file__).parents[2]
PACKAGE = Path(slime.__file__).parent
MODULES = sorted(
    ".".join(("slime", *f.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for f in PACKAGE.rglob("*.py")
    if not f.stem.startswith("_") or f.stem == "__init__"
)


def python(code: str, *, cwd: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    start = "" if path is None else f"import sys; sys.path.append({str(path)!r}); "
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def test_light_import() -> None:
    heavy = ["torch", "transformers", "numpy", "aiohttp", "httpx", "fastapi"]
    modules = "slime.utils.types, slime.rollout.sglang_rollout, slime.rollout.rm_hub"
    done = python(f"import {modules}; import sys; print([m for m in {heavy} if m in sys.modules])")
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_every_module_says_what_it_is_and_exports_what_it_has() -> None:
    assert len(MODULES) > 25
    for name in MODULES:
        module = importlib.import_module(name)
        assert (module.__doc__ or "").strip(), name
        for public in getattr(module, "__all__", ()):
            assert getattr(module, public).__doc__, f"{name}.{public}"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import slime.ray.rollout", "no slime.ray; nearest: `slime train` runs the loop"),
        ("from slime.rollout import forge_load", "forge_load; nearest: --load-debug-rollout-data PATH"),
        (
            "from slime.utils.misc import exec_command",
            "misc has no 'exec_command'; nearest: subprocess.run",
        ),
        ("from slime.utils.misc import nothing_like_it", "has no 'nothing_like_it'; docs/how-to/"),
        ("import slime.unheard_of", "no slime.unheard_of; docs/how-to/"),
        ("from slime.backends.megatron_utils.actor import X", "megatron_utils.actor; nearest: slime.backends"),
    ],
)
def test_what_is_missing_names_what_is_near(statement: str, said: str) -> None:
    with pytest.raises(ImportError, match="slime-compat") as caught:
        exec(statement)
    assert not isinstance(caught.value, ModuleNotFoundError)
    assert said in str(caught.value)


def test_looking_for_a_name_is_no_import() -> None:
    import slime.utils.misc as misc

    assert not hasattr(misc, "exec_command")
    assert getattr(misc, "exec_command", 7) == 7
    with pytest.raises(AttributeError, match=r"nearest: subprocess\.run"):
        misc.exec_command  # noqa: B018


def test_the_finder_is_installed_once_and_minds_its_own_names() -> None:
    before = len(sys.meta_path)
    _missing.install()
    assert len(sys.meta_path) == before
    assert _missing.Finder().find_spec("slime_other.module", None) is None
    with pytest.raises(ModuleNotFoundError):
        __import__("no_such_package_at_all")


def test_the_hints_are_about_things_that_are_not_there() -> None:
    for name in _missing.NEAREST:
        *_, last = name.split(".")
        file = PACKAGE.joinpath(*name.split(".")[1:])
        holds = file.with_suffix(".py").is_file()
        assert not holds, name
        parent = file.parent.with_suffix(".py")
        if parent.is_file():
            assert f"def {last}(" not in parent.read_text(encoding="utf-8"), name


# -- another `slime` -------------------------------------------------------------------------------------


def checkout(folder: Path) -> Path:
    """What a checkout of THUDM/slime looks like from outside."""
    (folder / "slime" / "utils").mkdir(parents=True)
    (folder / "slime" / "__init__.py").touch()
    (folder / "slime" / "utils" / "arguments.py").touch()
    return folder


def test_another_package_on_the_path_is_warned_about(tmp_path: Path) -> None:
    other = checkout(tmp_path / "checkout")
    done = python("import slime; print(slime.__file__)", path=other)
    assert Path(done.stdout.strip()) == PACKAGE / "__init__.py"
    assert "ShadowWarning" in done.stderr
    assert str(other / "slime") in done.stderr
    assert "pip uninstall slime-compat" in done.stderr


def test_a_namespace_package_counts_and_a_bare_folder_does_not(tmp_path: Path) -> None:
    other = checkout(tmp_path / "a")
    (other / "slime" / "__init__.py").unlink()
    (tmp_path / "b" / "slime").mkdir(parents=True)  # say, a folder of results
    assert _others.folders([str(other), str(tmp_path / "b"), str(PACKAGE.parent)]) == [other / "slime"]


def test_an_installed_distribution_slime_is_warned_about(tmp_path: Path) -> None:
    info = tmp_path / "slime-0.3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slime\nVersion: 0.3.1\n")
    done = python("import slime", path=tmp_path)
    assert "the distribution slime 0.3.1" in done.stderr


def test_alone_it_is_silent() -> None:
    assert _others.message() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error", _others.ShadowWarning)  # a socket somebody left tells of itself, too
        _others.warn()
