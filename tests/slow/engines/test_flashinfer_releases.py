"""The series on releases of FlashInfer that no recipe has.

It applies, leaves out the tiles that do not fit, and gives the releases since 0.6.11 the sources of the same dense GEMMs.
"""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version

from sm120kit import patches, sources
from sm120kit.core.workspace import Workspace
from sm120kit.patches.drift import VERSION_H, cutlass_version
from sm120kit.sources.git import Repository
from sm120kit.sources.index import ListedFile
from sm120kit.sources.origin import DEFAULT
from sm120kit.sources.releases import Releases
from sm120kit.sources.source_records import SdistPin, VendoredProject

ROOT = Path(__file__).parents[3]
CUTLASS = "3rdparty/cutlass"
GEMMS = (
    "csrc/fp4_gemm_cutlass_sm120.jinja",
    "csrc/mxfp8_gemm_cutlass_sm120.jinja",
    "include/flashinfer/gemm/fp4_gemm_template_sm120.h",
    "include/flashinfer/gemm/mxfp8_gemm_template_sm120.h",
)
"""What the kernels of the two dense modules are compiled from, beside CUTLASS: of 0.6.11 to 0.6.18 to the same machine code."""
GENERATOR = re.compile(r"def gen_gemm_sm120_module_cutlass_mxfp8\(.*?for cta_m, cta_n, cta_k", re.DOTALL)


def releases() -> list[ListedFile]:
    """The sdists of 0.6.9 to 0.6.18, with their post-releases.

    Release candidates are left out: 0.6.11rc1 is in neither ``<0.6.11`` nor ``>=0.6.11``.
    """
    sdists = [file for file in Releases(DEFAULT).files("flashinfer-python") if file.filename.endswith(".tar.gz")]
    final = [file for file in sdists if not Version(file.version).is_prerelease]
    return [file for file in final if Version("0.6.9") <= Version(file.version) < Version("0.6.19")]


def test_series_applies_to_releases_and_leaves_out_tiles() -> None:
    listed, workspace = releases(), Workspace.open(None)
    gemms: dict[str, tuple[str | bytes, ...]] = {}
    assert len(listed) >= 19
    for file in listed:
        pin = SdistPin("flashinfer", "flashinfer-python", file.version, file.location.sha256)
        checkout = sources.fetch(pin, workspace)
        header = Repository(checkout.repository).read(checkout.tree, f"{CUTLASS}/{VERSION_H}")
        inside = (VendoredProject("cutlass", CUTLASS, cutlass_version(header.decode())),)
        tree = patches.apply(checkout, inside, ROOT / "patches", ROOT / "cutlass_overrides")
        (applied,) = (patch.slug for patch in tree.patches if patch.slug.startswith("mxfp8-tiles-that-fit"))
        assert applied.endswith("--0.6.11") is (Version(file.version) >= Version("0.6.11")), file.version
        repository = Repository(checkout.repository)
        generator = repository.read(tree.tree, "flashinfer/jit/gemm/core.py").decode()
        (tiles,) = GENERATOR.findall(generator)
        assert "(128, 128, 128)" in tiles and "256" not in tiles, file.version
        contents = (repository.read(tree.tree, path) for path in GEMMS)
        gemms[file.version] = (repository.subtree(tree.tree, CUTLASS), *contents)
    compiled = {version: parts for version, parts in gemms.items() if Version(version) >= Version("0.6.11")}
    assert [version for version, parts in compiled.items() if parts != compiled["0.6.18"]] == []
    assert gemms["0.6.10"] != gemms["0.6.18"], "another CUTLASS"
