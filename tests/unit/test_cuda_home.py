"""The CUDA home in a work directory does not change the toolkit that it links to."""

from __future__ import annotations

from pathlib import Path

from sm120kit.wheels._cuda_home import relink_programs


def toolkit(root: Path) -> Path:
    programs = root / "toolkit" / "bin"
    (programs / "crt").mkdir(parents=True)
    for name in ("nvcc", "ptxas", "cudafe++"):
        (programs / name).write_text(name)
    return programs


def test_all_programs_but_the_front_end_are_linked(tmp_path: Path) -> None:
    programs = toolkit(tmp_path)
    relink_programs(tmp_path / "cuda" / "bin", programs)
    assert {path.name: path.readlink() for path in (tmp_path / "cuda" / "bin").iterdir()} == {
        name: programs / name for name in ("crt", "nvcc", "ptxas")
    }


def test_link_instead_of_bin_directory_is_replaced(tmp_path: Path) -> None:
    programs = toolkit(tmp_path)
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "bin").symlink_to(programs)
    relink_programs(tmp_path / "cuda" / "bin", programs)
    assert not (tmp_path / "cuda" / "bin").is_symlink()
    assert (tmp_path / "cuda" / "bin" / "nvcc").is_symlink()
    assert (programs / "crt").is_dir()
    for name in ("nvcc", "ptxas", "cudafe++"):
        assert not (programs / name).is_symlink()
        assert (programs / name).read_text() == name
