"""Teachers that cannot teach, and students that cannot learn, end with one line; on real ranks."""

import shutil

import pytest
import torch

import ranks
from jobs import ds_config, losses_of, run_distill, write_corpus
from wrong_input import check_one_line, run_wrong

NOT_FINITE = "its logits are not finite (nan); its weights may be damaged"
WRONG = {
    "--teacher={folder}/damaged_teacher": f"damaged_teacher: {NOT_FINITE}",
    "--teacher={folder}/damaged_teacher --teacher_tp=2": f"damaged_teacher: {NOT_FINITE}",
    "--teacher={folder}/damaged_teacher --tiled=false": f"damaged_teacher: {NOT_FINITE}",
    "--student={folder}/damaged_student": f"--student {{folder}}/damaged_student: {NOT_FINITE}",
    "--student={folder}/damaged_student --tiled=false --kd_weight=0":
        "precision too narrow; check its files, or use bf16 or float32 in --ds_config",
    "--teacher={folder}/other_head --tiled=false --teacher_output=topk":
        "of which --teacher_output topk keeps some; use --teacher_output logits",
    "--student={folder}/images": "gemma3 models read more than text",
    "--teacher={folder}/mistral3":
        "mistral3: transformers has no causal language model of type mistral3",
    "--student={folder}/qwen2_5_vl --sequence_parallel=2":
        "qwen2_5_vl: transformers has no causal language model of type qwen2_5_vl",
    "--teacher={folder}/images --teacher_tp=2 --teacher_engine=tensor_parallel":
        "--teacher_engine tensor_parallel: does not shard gemma3 models",
}


@pytest.fixture(scope="module")
def folder(models, tokenizers, tmp_path_factory):
    """Models that are damaged, or of other kinds."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("wrong_teachers")
    for path in models:
        damaged = folder / f"damaged_{path.name}"
        shutil.copytree(path, damaged)
        model = AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            model.base_model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
        model.save_pretrained(damaged)
    shape = dict(vocab_size=510, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=8,
                 max_position_embeddings=256)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, image_size=16,
                  num_attention_heads=2, patch_size=8)
    configs = {
        "images": AutoConfig.for_model(
            "gemma3", text_config=shape, vision_config=vision, mm_tokens_per_image=4,
            image_token_index=509),
        # bends its logits by a number that its config calls by a name of its own
        "other_head": AutoConfig.for_model(
            "recurrent_gemma", vocab_size=510, hidden_size=32, intermediate_size=64, head_dim=8,
            num_hidden_layers=3, num_attention_heads=4, lru_width=32, logits_soft_cap=0.01,
            max_position_embeddings=256),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizers[1].save_pretrained(folder / name)
    for name in ("mistral3", "qwen2_5_vl"):  # nobody asks for their weights
        AutoConfig.for_model(name).save_pretrained(folder / name)
        tokenizers[1].save_pretrained(folder / name)
    return folder


@pytest.fixture
def base(models, texts, tmp_path):
    """Flags of a good command line."""
    return [f"--student={models[0]}", f"--teacher={models[1]}", "--steps=1", "--max_length=40",
            f"--data={write_corpus(tmp_path, texts, 8)}", f"--output_dir={tmp_path / 'run'}",
            f"--ds_config={ds_config(tmp_path / 'ds.json', 2, 2, 1)}"]


@pytest.mark.slow
def test_models_that_cannot_be_used_end_with_one_line(folder, base, tmp_path):
    ended = run_wrong(2, WRONG, base, folder)
    for change, of_ranks in ended.items():
        check_one_line(of_ranks, WRONG[change])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_damaged_teacher_on_ranks_of_its_own_ends_with_one_line(folder, base):
    change = "--teacher={folder}/damaged_teacher --teacher_ranks=1"
    [(first, second, teacher)] = run_wrong(3, [change], base, folder).values()
    check_one_line((first, second), f"damaged_teacher: {NOT_FINITE}")
    assert teacher.exit_code in (0, None) and teacher.stderr == "", teacher


@pytest.mark.slow
def test_a_teacher_that_reads_images_teaches_in_shards(folder, base, tmp_path):
    """However it is held, the first step has the same loss."""
    ways = ["--teacher_tp=1"], ["--teacher_tp=2"], ["--teacher_engine=zero3"]
    runs = []
    for number, flags in enumerate(ways):
        runs.append([*base, f"--teacher={folder / 'images'}", *flags,
                     f"--output_dir={tmp_path / str(number)}"])
    assert ranks.run(2, run_distill, runs) == [[0, 0, 0]] * 2
    losses = [losses_of(tmp_path / str(number))[0]["loss"] for number in range(len(ways))]
    assert max(losses) - min(losses) < 1e-5 * losses[0]
