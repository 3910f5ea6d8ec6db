"""Forward skipping on networks from the literature and of the transformers library, tiny and with random weights."""

from __future__ import annotations

import pytest
import torch
from benchmarks.models.segmentation import deeplabv3, deeplabv3plus, unet

from egeria.errors import UncacheableError
from skipping import Frozen, assert_replay_is_computing, batch_of, copies

transformers = pytest.importorskip("transformers", reason="transformers is in the dev extra")
TINY = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, num_labels=3, **TINY))


def bert_for_tokens():
    return transformers.BertForTokenClassification(transformers.BertConfig(vocab_size=50, num_labels=3, **TINY))


def gpt2(use_cache=False):
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=4, n_head=2)
    config.use_cache = use_cache
    return transformers.GPT2LMHeadModel(config)


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **TINY)
    )


def t5(dropout=0.0):
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_decoder_layers=2, num_heads=2
    )
    config.dropout_rate = dropout
    config.decoder_start_token_id = 0
    config.use_cache = False
    return transformers.T5ForConditionalGeneration(config)


def marian(dropout=0.0):
    config = transformers.MarianConfig(
        dropout=dropout,
        vocab_size=50,
        d_model=16,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=16,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return transformers.MarianMTModel(config)


def sentences(labels, lengths=(8, 5, 7, 6, 3), seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_rows, longest = len(lengths), max(lengths)
    words = torch.randint(1, 50, (num_rows, longest), generator=generator)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    wanted = {"class": (num_rows,), "token": (num_rows, longest)}.get(labels)
    targets = words if wanted is None else torch.randint(0, 3, wanted, generator=generator)
    return (), {"input_ids": words * mask, "attention_mask": mask, "labels": targets}


def pictures(channels=3, side=16, num_rows=3):
    return (torch.randn(num_rows, channels, side, side, generator=torch.Generator().manual_seed(0)),), {}


def pixels(num_rows=5):
    (images,), _ = pictures(side=8, num_rows=num_rows)
    return (), {"pixel_values": images, "labels": torch.arange(num_rows) % 3}


def check_all_depths(build, example, other, **options):
    """Law 3 at every depth; what crosses at each."""
    deepest = len(Frozen(build, example).modules) - 1
    crossing = []
    for depth in range(1, deepest + 1):
        plain, skipping = (Frozen(build, example, depth, **options) for _ in range(2))
        prefix = skipping.find()
        assert_replay_is_computing(plain, skipping, prefix, example)
        assert not prefix.knows(batch_of(other))
        prefix.learn(batch_of(other))
        assert_replay_is_computing(plain, skipping, prefix, other)
        crossing.append([(*leaf.place, leaf.axis) for leaf in prefix.leaves])
        if depth == deepest:
            crossing.append(prefix)
    return crossing


def test_bert_hands_over_the_last_layer_alone():
    other = sentences("class", lengths=(6, 4, 2), seed=1)
    *crossing, prefix = check_all_depths(bert, sentences("class"), other)
    assert crossing == [[(f"bert.encoder.layer.{depth}", 0, 0)] for depth in range(len(crossing))]
    assert [leaf.length_axis for leaf in prefix.leaves] == [0] and prefix.can_split


def test_padding_is_kept_where_outputs_show_it():
    *_, prefix = check_all_depths(bert_for_tokens, sentences("token"), sentences("token", (6, 4, 2), 1))
    assert [leaf.length_axis for leaf in prefix.leaves] == [None]


def test_rows_kept_at_their_own_length_are_right_in_longer_batches():
    short = sentences("class", lengths=(5, 3, 4))
    example = sentences("class")
    frozen = Frozen(bert, example, 3)
    prefix = frozen.find()
    prefix.learn(batch_of(short))
    (rows,) = prefix.compute(batch_of(short))
    longer = {name: torch.nn.functional.pad(value, (0, 2)) for name, value in short[1].items() if name != "labels"}
    longer = (), {**longer, "labels": short[1]["labels"]}
    prefix.learn(batch_of(longer))
    stored = torch.nn.functional.pad(rows, (0, 0, 0, 2))
    for row, length in enumerate((5, 3, 4)):
        stored[row, length:] = 0
    torch.manual_seed(3)
    _, kwargs = copies(longer)
    computed = frozen.model(**kwargs).logits
    torch.manual_seed(3)
    with prefix.replaying([stored], batch_of(longer)):
        replayed = frozen.model(**kwargs).logits
    assert torch.allclose(computed, replayed, rtol=1e-4, atol=1e-6)


def test_hooks_that_collect_hidden_states_are_refused():
    _, kwargs = sentences("class")
    example = (), {**kwargs, "output_hidden_states": True}
    frozen = Frozen(bert, example, 2)
    with pytest.raises(UncacheableError, match=r"forward hook on bert.encoder.layer.0.*output_capturing_hook"):
        frozen.find()


def test_gpt2():
    *crossing, _ = check_all_depths(gpt2, sentences("words"), sentences("words", (6, 4, 2), 1), freeze_tied=True)
    assert all(len(leaves) == 1 for leaves in crossing)


def test_gpt2_with_its_cache_is_refused_with_the_way_out():
    frozen = Frozen(lambda: gpt2(use_cache=True), sentences("words"), 2, freeze_tied=True)
    with pytest.raises(UncacheableError, match="use_cache=False"):
        frozen.find()


def test_a_tied_output_layer_is_refused_with_the_way_out():
    with pytest.raises(UncacheableError, match="untie it, or set its requires_grad to False"):
        Frozen(gpt2, sentences("words"), 2).find()


def test_vit():
    *crossing, _ = check_all_depths(vit, pixels(), pixels(num_rows=2))
    assert all(len(leaves) == 1 for leaves in crossing)


def test_t5_hands_over_its_position_bias_as_a_constant():
    *crossing, _ = check_all_depths(t5, sentences("words"), sentences("words", (6, 4, 2), 1), freeze_tied=True)
    assert crossing[0][-1][1:] == (1, None), "the position bias is the same for every sample"
    assert any(len(leaves) > 1 for leaves in crossing)


def test_an_encoder_and_decoder_of_transformers():
    *crossing, _ = check_all_depths(marian, sentences("words"), sentences("words", (6, 4, 2), 1), freeze_tied=True)
    assert any("decoder" in root for leaves in crossing for root, _, _ in leaves)


@pytest.mark.parametrize(("build", "reason"), [(t5, "encoder.dropout is in training"), (marian, "functional dropout")])
def test_dropout_between_frozen_layers_is_refused(build, reason):
    frozen = Frozen(lambda: build(dropout=0.1), sentences("words"), 2, freeze_tied=True)
    with pytest.raises(UncacheableError, match=reason):
        frozen.find()


def test_unet_hands_over_every_skip():
    *crossing, _ = check_all_depths(lambda: unet(width=4), pictures(channels=1), pictures(channels=1, num_rows=2))
    roots = [{root for root, _, _ in leaves} for leaves in crossing]
    assert {"encoders.0", "encoders.1", "encoders.2"} in roots


def test_deeplabv3():
    *crossing, _ = check_all_depths(lambda: deeplabv3(3, width=4), pictures(), pictures(num_rows=2))
    assert all(len(leaves) == 1 for leaves in crossing[:3])


def test_deeplabv3plus_hands_over_two():
    *crossing, _ = check_all_depths(lambda: deeplabv3plus(3, width=4), pictures(), pictures(num_rows=2))
    two = [sorted(root for root, _, _ in leaves) for leaves in crossing if len(leaves) == 2]
    assert any("layer1" in first for first, _ in two)
