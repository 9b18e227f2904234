"""What the ranks of the tests have in common, imported and compiled once, in their server.

Else every rank imports 1,800 modules more on first use and loads numba's compiled functions, which
costs it more than its test.  `freeze` keeps the collector from touching, and so copying, all that
they have in common.
"""

import gc

import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.zero.muon.muon_optimizer
import torch
import transformers.conversion_mapping
import transformers.trainer_utils  # noqa: F401

from isogloss import cpu_kernels, demo, distill  # noqa: F401
from isogloss.align import TokenTable
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.sample import TextEncoder

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # probes them all
tokenizer = demo.byte_level_bpe(["warm"], 256)
shape = dict(hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1)
demo.llama(tokenizer, shape, 0)
encoder = TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), 9)
Collator(encoder, [PairOptions(encoder)])(["warm"])
logits = torch.zeros(1, 3)
rows = torch.zeros(1, dtype=torch.long)
chunks = logits, torch.ones(1), rows, rows
events = torch.zeros(3, dtype=torch.int32)
cpu_kernels.event_kl(logits, rows, logits, rows, events, events, 1, 0.0)
cpu_kernels.mixture_distance(chunks, chunks, None, None, 3, 1.0)
cpu_kernels.divergence(logits, logits, (1.0, 0.0, 1.0), 1.0, 1.0, -1e4)
kept = cpu_kernels.kept_logp(logits, rows, rows[:, None], 1.0, -1e4, False)
cpu_kernels.kept_derivative(
    logits, rows, rows[:, None], kept, torch.ones(1, 1), torch.ones(1), 1.0, -1e4)
gc.collect()
gc.freeze()
