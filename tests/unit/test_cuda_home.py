"""The CUDA home in a work directory does not change the toolkit that it links to."""

from __future__ import annotations

from pathlib import Path

from sm120kit.wheels._cuda_home import relink_libraries, relink_programs


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


def test_libraries_are_those_of_the_present_toolkit(tmp_path: Path) -> None:
    """Another environment may have made the work directory, and be gone: every unit would be compiled, and no module linked."""
    new, other = tmp_path / "new", tmp_path / "other"
    for directory in (new, other):
        directory.mkdir()
        (directory / "libcudart.so.13").touch()
    for name in ("libcudart.so", "libcudart.so.13"):
        (tmp_path / name).symlink_to(tmp_path / "removed" / "libcudart.so.13")
    relink_libraries(tmp_path, (new, other))
    assert {(tmp_path / name).readlink() for name in ("libcudart.so", "libcudart.so.13")} == {new / "libcudart.so.13"}
