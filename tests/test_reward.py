"""A reward's gradient, by enumeration of all that a toy can write."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

import ranks
from isogloss import distill
from isogloss.data.batch_types import Example
from isogloss.data.rollouts import TRAINING, RolloutPrompt
from isogloss.environments.reward import give_advantages, weigh_policy
from isogloss.policy_losses import advantages, policy_pull
from isogloss.student.whole_student import WholeStudent
from isogloss.writing.on_policy import load_writer
from isogloss.writing.rollout_ratio import current_logp
from jobs import ds_config, job_for
from test_rollout_ratio import COPIES, PLACES, PROMPT, probabilities, write_toy

BASELINE = 0.3  # whatever it is, the expectation is the same


def reward_of(text):
    """Return any function of a whole text."""
    return sum((token + 1) ** (place + 1) for place, token in enumerate(text)) % 7 / 7


def expected_reward(model, texts):
    """Return () with a gradient, by the definition."""
    total = 0.0
    prompt = torch.tensor([[0, 1]])
    for text in texts:
        ids = torch.cat([prompt, torch.tensor([text])], 1)
        logp = model(input_ids=ids).logits[0, 1:-1, :3].double().log_softmax(-1)
        total += reward_of(text) * logp.gather(1, ids[0, 2:, None]).sum().exp()
    return total


def errors(flags, changes):
    """Return {does older weights write: relative error of the reward's gradient}."""
    state, inputs = job_for(flags)
    state.whole_student = WholeStudent(state.engine, None, state.device)
    writer = load_writer(state, inputs)
    model = state.engine.module.model
    prompts = [writer.prompter.prompt(Example(PROMPT * 2), (number, 0)) for number in range(COPIES)]
    by_text = {tuple(rollout.ids.tolist()): rollout
               for rollout in writer.rollouts(prompts, TRAINING)}
    before = {text: float(probabilities(model, text, 1.0)[-1]) for text in by_text}
    for text, rollout in by_text.items():
        advantage = before[text] * (reward_of(text) - BASELINE) * len(by_text)
        rollout.episode = {"advantage": advantage}
    found = {}
    for is_old in changes:
        if is_old:
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.1 * torch.randn_like(parameter)
        examples = [Example(rollout) for rollout in by_text.values()]
        gradients = []
        for weight in (1.0, 0.0):  # the difference is the reward's
            batch = writer.collator(examples)
            logps = [current_logp(state.cfg, state.student, batch.student)] if is_old else None
            weigh_policy(state, [batch], logps, weight)
            weights = distill.TermWeights(0.0, [0.01 / batch.counts.pairs[0].kd_terms])
            [parts] = distill.all_parts(state, [batch])
            terms = distill.loss_terms(state, batch, parts, weights)
            loss, _ = state.engine.module(batch.student, terms)
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
            for setup in state.teachers:
                setup.source.release()
        ours = [(a - b).double() * -PLACES for a, b in zip(*gradients)]
        exact = torch.autograd.grad(expected_reward(model, by_text), list(model.parameters()))
        difference = sum(((a - b) ** 2).sum() for a, b in zip(ours, exact))
        found[is_old] = float((difference / sum((b.double() ** 2).sum() for b in exact)).sqrt())
    return len(by_text), found


@pytest.mark.parametrize("more", [{}, {"tiled": False}, {"loss": "alm"}])
def test_the_expected_gradient_is_that_of_the_expected_reward(tmp_path, more):
    """By today's weights, and by older ones, which the ratio of whole texts makes up for."""
    write_toy(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": PROMPT * 2}))
    flags = dict(
        student=str(tmp_path / "model"), teacher=str(tmp_path / "model"), max_length=16,
        data=str(tmp_path / "data.jsonl"), on_policy=1.0, rollout_tokens=PLACES, prompt_tokens=2,
        loss="reverse_kl", max_ratio=1e6, rollout_every=2, rollout_batch=1000,
        ds_config=ds_config(tmp_path / "ds.json", 0, 1, 1)) | more
    [(num_texts, found)] = ranks.run(1, errors, flags, (False, True))
    assert num_texts == 2 ** (PLACES + 1) - 1
    assert max(found.values()) < 1e-6, found


def test_a_text_is_compared_with_the_others_of_its_prompt():
    """Its expectation is the reward above the expected one, over all groups of three draws."""
    probability = [0.5, 0.3, 0.2]
    reward = torch.tensor([1.0, 0.25, -2.0], dtype=torch.float64)
    expected = sum(p * float(r) for p, r in zip(probability, reward))
    group = torch.tensor([4, 9, 9, 9])  # beside one that is alone
    for first in range(3):
        total = 0.0
        for others in itertools.product(range(3), repeat=2):
            rewards = reward[[2, first, *others]]
            found = advantages(rewards, group)
            assert found[0] == 0 and abs(float(found[1:].sum())) < 1e-12
            total += probability[others[0]] * probability[others[1]] * float(found[1])
        assert abs(total - (float(reward[first]) - expected)) < 1e-12


def test_the_pull_is_0_and_leaves_positions_without_a_label():
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([2, -100, 0, 4])
    weight = torch.tensor([0.5, 7.0, -1.0, 0.0], dtype=torch.float64)
    value = policy_pull(logits, labels, weight)
    assert float(value) == 0
    value.backward()
    expected = torch.zeros(4, 5, dtype=torch.float64)
    for row, label in ((0, 2), (2, 0), (3, 4)):
        expected[row] = weight[row] * logits[row].detach().softmax(-1)
        expected[row, label] -= weight[row]
    assert torch.allclose(logits.grad, expected, atol=1e-12)


def rollout(source, copy, reward):
    return SimpleNamespace(prompt=SimpleNamespace(key=(source, copy)), episode={"reward": reward})


def advantages_of_ranks(of_ranks):
    import torch.distributed as dist

    from isogloss.job.launch import start_distributed

    start_distributed()
    rollouts = [rollout(*entry) for entry in of_ranks[dist.get_rank()]]
    give_advantages(rollouts, True)
    return [entry.episode["advantage"] for entry in rollouts]


def test_a_group_may_lie_on_several_ranks():
    """An episode without a reward counts as 0."""
    of_ranks = [[(3, 0, 1.0), (8, 0, 5.0)], [(3, 1, None), (3, 2, 0.5)]]
    assert ranks.run(2, advantages_of_ranks, of_ranks) == [[0.75, 0.0], [-0.75, 0.0]]


def test_teachers_read_the_best_other_attempt_of_a_prompt():
    """In front of a chat, one message with that of the chat; not where none is above the mean."""
    calls = [{"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}]
    said = [[{"role": "assistant", "content": "", "tool_calls": calls},
             {"role": "tool", "content": "blue"}, {"role": "assistant", "content": "Blue."}],
            [{"role": "assistant", "content": "Red."}], [{"role": "assistant", "content": "Green"}]]
    taught = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Which?"}]
    rollouts = []
    for source, copy, reward in ((3, 0, 1.0), (3, 1, 0.0), (3, 2, 0.0), (4, 0, 0.5), (4, 1, 0.5)):
        prompt = RolloutPrompt((source, copy), None, "", None, taught, 9, None, taught)
        rollouts.append(SimpleNamespace(prompt=prompt, episode={"reward": reward},
                                        messages=said[copy]))
    found = ranks.run(1, taught_with_hints, rollouts)[0]
    hint = ("An earlier attempt that succeeded:\n\nassistant calls look({\"at\": 1})\n"
            "tool: blue\nassistant: Blue.\n\nBe short.")
    hinted = [{"role": "system", "content": hint}, taught[1]]
    assert found == [taught, hinted, hinted, taught, taught]


def taught_with_hints(rollouts):
    from isogloss.job.launch import start_distributed

    start_distributed()
    give_advantages(rollouts, True, "own_success")
    return [entry.prompt.taught for entry in rollouts]
