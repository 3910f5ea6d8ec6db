"""Models of the transformers library, tiny and with random weights: freezing from the front, and back."""

from __future__ import annotations

import pytest
import torch

from egeria import attach, read_journal
from egeria.events import Declined, FaultCaught, PlasticityRead, ReadingDropped
from loops import FAST, outside

transformers = pytest.importorskip("transformers", reason="transformers is in the dev extra")


def bert():
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    return transformers.BertForSequenceClassification(config), {"labels": 3}


def gpt2():
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=4, n_head=2)
    return transformers.GPT2LMHeadModel(config), {"labels": None}


def t5():
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config), {"labels": None}


def vit():
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config), {"pixels": True, "labels": 3}


def batch(generator, kind):
    labels = kind.get("labels")
    if kind.get("pixels"):
        return {
            "pixel_values": torch.randn(4, 3, 8, 8, generator=generator),
            "labels": torch.randint(0, 3, (4,), generator=generator),
        }
    words = torch.randint(1, 50, (4, 8), generator=generator)
    mask = torch.ones_like(words)
    mask[0, 5:] = 0
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": words if labels is None else torch.randint(0, labels, (4,), generator=generator),
    }


def train(model, run, optimizer, kind, steps):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        model.train()
        loss = model(**batch(generator, kind)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)


each = pytest.mark.parametrize("build", [bert, gpt2, t5, vit], ids=lambda build: build.__name__)


@each
def test_the_front_freezes_and_comes_back(build, tmp_path):
    torch.manual_seed(0)
    model, kind = build()
    before = outside(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = attach(model, optimizer, plan="0:20", total_steps=10, directory=tmp_path)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, run, optimizer, kind, 4)
    assert run.frozen == len(run.modules) - 1 >= 2
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, start[name])}
    assert moved == set(run.modules[-1].parameters)
    assert read_journal(tmp_path).of(Declined) == [] == read_journal(tmp_path).of(FaultCaught)
    run.close()
    assert outside(model.train()) == before


@each
def test_snapshots_give_readings(build, tmp_path):
    torch.manual_seed(0)
    model, kind = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {**FAST, "freezing": {"tolerance_share": 5.0}}
    with attach(model, optimizer, config=config, directory=tmp_path) as run:
        train(model, run, optimizer, kind, 40)
    journal = read_journal(tmp_path)
    readings = journal.of(PlasticityRead)
    assert len(readings) > 10 and all(reading.value > 0 for reading in readings)
    assert len({reading.module for reading in readings}) > 1
    assert journal.of(ReadingDropped) == [] == journal.of(FaultCaught)
    shares = next([entry["share"] for entry in event.modules] for event in journal if event.kind == "run_started")
    assert sum(shares) == pytest.approx(1) and min(shares) > 0
