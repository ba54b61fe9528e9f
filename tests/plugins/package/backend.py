"""Builds the wheel of this folder: pip needs a backend, and none is installed everywhere."""

import zipfile
from pathlib import Path

INFO = "fp8_extra-1.0.dist-info"
FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: fp8-extra\nVersion: 1.0\n",
    "WHEEL": "Wheel-Version: 1.0\nGenerator: backend\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "entry_points.txt": "[fp8_harness]\nextra = fp8_extra:PLUGIN\n",
}


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    name = "fp8_extra-1.0-py3-none-any.whl"
    contents = {path.as_posix(): path.read_text() for path in sorted(Path("fp8_extra").glob("*.py"))}
    contents |= {f"{INFO}/{file}": text for file, text in FILES.items()}
    contents[f"{INFO}/RECORD"] = "".join(f"{file},,\n" for file in (*contents, f"{INFO}/RECORD"))
    with zipfile.ZipFile(Path(wheel_directory) / name, "w") as wheel:
        for file, text in contents.items():
            wheel.writestr(file, text)
    return name
