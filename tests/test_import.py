"""What `import egeria` brings in: a command line, a test or a worker process must not wait for what it does not use."""

from __future__ import annotations

import subprocess
import sys

LATER = {"IPython", "jinja2", "matplotlib", "multiprocessing.pool", "psutil", "rich", "sklearn", "transformers"}
LATER |= {"accelerate", "datasets", "lightning", "mlflow", "peft", "tensorboard", "wandb"}
LATER |= {"torch._dynamo", "torch.ao.quantization", "torch.distributed.fsdp", "torch.onnx"}
LATER |= {"accelerate", "lightning", "pytorch_lightning", "peft"}
"""What only parts of the library need, and what is loaded when they are used."""


def test_what_is_heavy_is_loaded_when_it_is_used():
    code = "import sys, torch; before = set(sys.modules); import egeria; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    found = set(done.stdout.split())
    assert {"egeria", "egeria.session.attach"} <= found
    assert found & LATER == set()
