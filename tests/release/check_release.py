"""Build a release into dist/ and check it: `make release-check`.

Wheel and sdist are built twice and must be equal, pass twine's check, and have what is needed. The wheel is installed
into a bare environment, whose packages and licenses become an SBOM (CycloneDX) and a list of licenses beside it.
"""

import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from distributions import ROOT, SDIST, WHEEL, build, digest, faults
from rolltape import __version__

DIST = ROOT / "dist"


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    build(DIST)
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / "dist"
        build(again)
        differing = [name for name in (WHEEL, SDIST) if digest(DIST / name) != digest(again / name)]
        wrong = [*faults(DIST), *(f"{name}: differs when it is built again" for name in differing)]
        if wrong:
            sys.exit("\n".join(wrong))
        run(sys.executable, "-m", "twine", "check", "--strict", *(str(DIST / name) for name in (WHEEL, SDIST)))
        bare = Path(folder) / "bare"
        venv.create(bare, with_pip=True)
        python = str(bare / "bin" / "python")
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(DIST / WHEEL))
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")
        run(python, "-m", "rolltape.cli", "--version")
        sbom = str(DIST / f"rolltape-{__version__}.cdx.json")
        run(sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "-o", sbom, python)
        packages = distributions(path=[str(next((bare / "lib").glob("python*")) / "site-packages")])
        (DIST / "THIRD-PARTY-PYTHON.txt").write_text(licenses(packages))
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size:12,}  {path.relative_to(ROOT)}")


def run(*command: str) -> None:
    if code := subprocess.run(command).returncode:
        sys.exit(f"{' '.join(command)}: exit code {code}")


def licenses(packages: Iterable[Distribution]) -> str:
    """A line for each package of the plain install: name, version, license."""
    own = ("rolltape", "pip")
    lines = [
        f"{one.metadata['Name']} {one.version}: {license_of(one)}"
        for one in packages
        if one.metadata["Name"] not in own
    ]
    return "\n".join(sorted(lines, key=str.lower)) + "\n"


def license_of(package: Distribution) -> str:
    """The license as a package declares it: an expression, classifiers, or the first line of its text."""
    metadata = package.metadata
    if "License-Expression" in metadata:
        return str(metadata["License-Expression"])
    named = [one.split(" :: ")[-1] for one in metadata.get_all("Classifier", []) if one.startswith("License ::")]
    return ", ".join(named) or [*metadata.get_all("License", []), "not declared"][0].splitlines()[0]


if __name__ == "__main__":
    main()
