import json
from pathlib import Path

import pytest
import torch
from jinja2 import TemplateError
from train_demo_model import load_folder, recalled
from transformers import AutoModelForCausalLM, AutoTokenizer

import tandem

FOLDER = Path(tandem.__file__).parent / "demo_model"
HELD_OUT = json.loads((FOLDER / "held_out.json").read_text())


@pytest.fixture(scope="module")
def model():
    return load_folder(FOLDER)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@torch.no_grad()
def test_training_forward_equals_transformers(model, tokenizer):
    """The checkpoint's names and layout mean to others what training meant by them."""
    reference = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokens = tokenizer(HELD_OUT["texts"][0]["text"], return_tensors="pt").input_ids[:, :200]
    expected = reference(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_stored_loss_is_the_models(model, tokenizer):
    item = HELD_OUT["texts"][0]
    tokens = tokenizer(item["text"], return_tensors="pt").input_ids
    assert tokens.shape[1] == item["num_tokens"]
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
    assert loss.item() == pytest.approx(item["nll_per_token"], abs=1e-3)


def test_shipped_items_are_recalled(model, tokenizer):
    items = HELD_OUT["recall"][::5]
    right = recalled(model, tokenizer.backend_tokenizer, items, torch.device("cpu"))
    assert sum(right) == len(items)


def test_chat_template_ends_where_the_answer_starts(tokenizer):
    messages = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Good day."},
        {"role": "user", "content": "Who are you?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("Question: Hello.\nAnswer: Good day.</s>\nQuestion: Who are you?\nAnswer:")


def test_chat_template_takes_developers_for_systems_and_refuses_other_roles(tokenizer):
    def render(role: str) -> str:
        messages = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hello."}]
        return tokenizer.apply_chat_template(messages, tokenize=False)

    assert render("developer") == render("system") == "Be brief.\nQuestion: Hello.\nAnswer:"
    with pytest.raises(TemplateError, match="role wizard is not supported"):
        render("wizard")


def test_folder_fits_the_repository():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 24 * 10**6
