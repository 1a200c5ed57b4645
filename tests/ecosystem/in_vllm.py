# SPDX-License-Identifier: Apache-2.0
"""Runs in vLLM's own environment: continues a prompt, and scores a text, with the models of some folders.

``python in_vllm.py '{"FOLDER": [PROMPT, TEXT]}'`` takes both as lists of tokens. The last line that it prints has for
each folder the tokens that follow the prompt, and the log-probabilities of the text's tokens but the first.
"""

import json
import sys

import vllm
from vllm.distributed import cleanup_dist_env_and_memory

found = {}
for folder, (prompt, text) in json.loads(sys.argv[1]).items():
    engine = vllm.LLM(folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64)
    greedy = vllm.SamplingParams(temperature=0, max_tokens=len(text) - len(prompt), ignore_eos=True, detokenize=False)
    scored = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    [written], [known] = (
        engine.generate({"prompt_token_ids": tokens}, how, use_tqdm=False)
        for tokens, how in ((prompt, greedy), (text, scored))
    )
    scores = [row[token].logprob for row, token in zip(known.prompt_logprobs[1:], text[1:], strict=True)]
    found[folder] = list(written.outputs[0].token_ids), scores
    del engine
    cleanup_dist_env_and_memory()
print(json.dumps({"version": vllm.__version__, "found": found}))
