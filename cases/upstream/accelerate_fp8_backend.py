"""accelerate launch --fp8_backend ao: what each rank makes of the choice that the launcher accepts."""

import subprocess
import sys
import tempfile

RANK = "from accelerate import Accelerator; print(Accelerator().fp8_backend.value)"

failed = False
for backend in ("ao", "te", "msamp"):
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(RANK)
        script.flush()
        options = ["--cpu", "--num_processes=1", "--num_machines=1", "--dynamo_backend=no", "--mixed_precision=fp8"]
        launcher = [sys.executable, "-m", "accelerate.commands.launch", *options, f"--fp8_backend={backend}"]
        done = subprocess.run([*launcher, script.name], capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if "is not a valid FP8BackendType" in line]
    print("expected:", f"--fp8_backend={backend} selects {backend.upper()}, or fails because it is not installed")
    print("actual:  ", lines[-1] if lines else "it does")
    failed |= bool(lines)
raise SystemExit(failed)
