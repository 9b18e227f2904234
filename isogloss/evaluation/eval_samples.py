"""Let the student continue held-out texts at every evaluation, for people to read.

The tokens are the most likely ones, so that samples of two steps differ by the weights alone, and
nothing of the training's random state is used.

Tests: tests/test_cli.py, tests/test_distributed.py.
"""

import itertools
from dataclasses import dataclass

import torch.distributed as dist

from isogloss.data.ends import stop_ids
from isogloss.data.sample import TextEncoder
from isogloss.doors import door
from isogloss.job.rendezvous import values_of_ranks
from isogloss.rollout import Prompt, write
from isogloss.student.whole_student import WholeStudent, lend

REFERENCE = 300  # characters of the text itself that stand beside what the student wrote


@dataclass
class EvalSamples:
    """Hold the beginnings that the student continues.

    Attributes:
        student: WholeStudent.
        encoder: TextEncoder of the student.
        prompts: RolloutPrompts, whose keys are (row, 0).
        references: what the row itself goes on with; "" of a chat.
        batch_size: texts that a rank writes side by side.
    """

    student: WholeStudent
    encoder: TextEncoder
    prompts: list
    references: list
    batch_size: int

    def write(self):
        """Return a record of each sample, equal on every rank; all of them take part."""
        rank = dist.get_rank()
        num_ranks = dist.get_world_size()
        numbers = range(rank, len(self.prompts), num_ranks)
        starts = []
        for number in numbers:
            prompt = self.prompts[number]
            starts.append(Prompt(prompt.ids, prompt.key, prompt.max_new_tokens))
        table = self.encoder.table
        with self.student.model() as (model, agree):
            completions = write(model, starts, stop_ids(self.encoder), len(table), temperature=0,
                                batch_size=self.batch_size, pad_id=max(table.pad, 0), agree=agree,
                                equal_lengths=self.student.equal_lengths)
        records = []
        for number, completion in zip(numbers, completions):
            written = door("on_policy").completed(self.prompts[number], completion, self.encoder)
            records.append({
                "row": written.prompt.key[0], "prompt": written.prompt.text, "text": written.text,
                "ended": written.ended, "reference": self.references[number]})
        of_ranks = values_of_ranks(records)
        return sorted(itertools.chain.from_iterable(of_ranks), key=lambda record: record["row"])


def prepare(state, inputs, stack):
    lend(state, writes=True)
    state.samples = load_samples(state.cfg, inputs, state.whole_student)


def load_samples(cfg, inputs, student):
    """Return the EvalSamples of a run.

    Rows that give no prompt are left out, as on-policy.
    """
    rollouts = door("on_policy")
    prompter = rollouts.build_prompter(cfg, inputs.student, 1)
    prompts = []
    references = []
    for row, example in enumerate(inputs.data.held_out(cfg.eval_samples)):
        try:
            prompt = prompter.prompt(example, (row, 0))
        except rollouts.SkippedPrompt:
            continue
        prompts.append(prompt)
        is_text = isinstance(example.content, str)
        rest = example.content.removeprefix(prompt.text)[:REFERENCE] if is_text else ""
        references.append(rest)
    return EvalSamples(student, inputs.student, prompts, references, cfg.rollout_batch)
