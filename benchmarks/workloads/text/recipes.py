"""How each workload is trained in each tier."""

from dataclasses import replace

from benchmarks.workloads.text.characters import GptRecipe
from benchmarks.workloads.text.fine_tuning import Recipe as FineTuning
from benchmarks.workloads.text.pairs import PairRecipe
from benchmarks.workloads.text.squad import QuestionRecipe
from benchmarks.workloads.text.topics import TopicRecipe
from benchmarks.workloads.text.translation import Recipe as Translation

_TINY_MULTI30K_ONE_CORE = Translation(
    width=128,
    inner_width=512,
    num_heads=4,
    num_layers=2,
    dropout=0.1,
    vocabulary=4000,
    longest=60,
    num_train=None,
    num_validation=1014,
    num_translated=200,
    batch_size=64,
    num_epochs=3,
    peak_rate=2e-3,
    warmup_steps=200,
    evaluations_per_epoch=4,
)
TINY_MULTI30K = {
    "smoke": Translation(
        width=64,
        inner_width=128,
        num_heads=4,
        num_layers=2,
        dropout=0.1,
        vocabulary=1000,
        longest=40,
        num_train=1000,
        num_validation=100,
        num_translated=20,
        batch_size=32,
        num_epochs=2,
        peak_rate=3e-3,
        warmup_steps=20,
    ),
    "cpu": _TINY_MULTI30K_ONE_CORE,
    "long": replace(_TINY_MULTI30K_ONE_CORE, num_epochs=15, warmup_steps=600, evaluations_per_epoch=1),
    "gpu": Translation(
        width=256,
        inner_width=1024,
        num_heads=4,
        num_layers=2,
        dropout=0.2,
        vocabulary=8000,
        longest=100,
        num_train=None,
        num_validation=None,
        num_translated=1014,
        batch_size=128,
        num_epochs=30,
        peak_rate=1e-3,
        warmup_steps=1000,
    ),
}
"""2+2 layers."""

BASE_WMT = {
    "smoke": Translation(
        width=32,
        inner_width=64,
        num_heads=2,
        num_layers=6,
        dropout=0.1,
        vocabulary=1000,
        longest=40,
        num_train=600,
        num_validation=60,
        num_translated=2,
        batch_size=32,
        num_epochs=2,
        peak_rate=3e-3,
        warmup_steps=20,
    ),
    "cpu": Translation(
        width=64,
        inner_width=256,
        num_heads=4,
        num_layers=6,
        dropout=0.1,
        vocabulary=4000,
        longest=50,
        num_train=None,
        num_validation=300,
        num_translated=60,
        batch_size=64,
        num_epochs=5,
        peak_rate=3e-3,
        warmup_steps=200,
        evaluations_per_epoch=2,
    ),
    "gpu": Translation(
        width=512,
        inner_width=2048,
        num_heads=8,
        num_layers=6,
        dropout=0.3,  # the paper's 0.1 is for 4.5 million pairs; this slice has ten thousand
        vocabulary=8000,
        longest=100,
        num_train=None,
        num_validation=None,
        num_translated=500,
        batch_size=128,
        num_epochs=40,
        peak_rate=7e-4,
        warmup_steps=1000,
    ),
}
"""6+6 layers."""

SQUAD = {
    "smoke": QuestionRecipe(
        longest=96,
        overlap=32,
        longest_paragraph=300,
        num_train=64,
        num_held_out=24,
        num_judged=40,
        batch_size=8,
        num_epochs=2,
        peak_rate=1e-4,
        evaluations_per_epoch=1,
    ),
    "cpu": QuestionRecipe(
        longest=128,
        overlap=48,
        longest_paragraph=450,
        num_train=2000,
        num_held_out=400,
        num_judged=3000,
        batch_size=16,
        num_epochs=2,
        peak_rate=2e-4,
    ),
    "long": QuestionRecipe(
        longest=160,
        overlap=48,
        longest_paragraph=550,
        num_train=10_000,
        num_held_out=400,
        num_judged=3000,
        batch_size=16,
        num_epochs=3,
        peak_rate=1e-4,
        evaluations_per_epoch=3,
    ),
    "gpu": QuestionRecipe(
        longest=384,
        overlap=128,
        num_train=None,
        num_held_out=None,
        num_judged=0,
        batch_size=32,
        num_epochs=3,
        peak_rate=5e-5,
    ),
}

SST2 = {
    "smoke": FineTuning(
        longest=32,
        num_train=160,
        num_held_out=100,
        num_judged=200,
        batch_size=16,
        num_epochs=2,
        peak_rate=1e-4,
        evaluations_per_epoch=2,
    ),
    "cpu": FineTuning(
        longest=64, num_train=6000, num_held_out=None, num_judged=8000, batch_size=32, num_epochs=3, peak_rate=1e-4
    ),
    "long": FineTuning(
        longest=64, num_train=None, num_held_out=None, num_judged=8000, batch_size=32, num_epochs=3, peak_rate=5e-5
    ),
    "gpu": FineTuning(
        longest=128, num_train=None, num_held_out=None, num_judged=8000, batch_size=32, num_epochs=3, peak_rate=3e-5
    ),
}

LORA_RATE = 1e-3
SST2_LORA = {
    "smoke": replace(SST2["smoke"], peak_rate=LORA_RATE),
    "cpu": replace(SST2["cpu"], num_train=16_000, peak_rate=LORA_RATE),
    "long": replace(SST2["long"], peak_rate=LORA_RATE),
    "gpu": replace(SST2["gpu"], peak_rate=LORA_RATE),
}

SST2_LORA_CHECKPOINTS = {**SST2_LORA, "cpu": replace(SST2_LORA["cpu"], num_train=8_000)}
SST2_MPNET = {
    "smoke": replace(SST2["smoke"], num_train=64, num_held_out=40, num_judged=60, evaluations_per_epoch=1),
    "cpu": replace(
        SST2["cpu"],
        num_train=2400,
        num_held_out=300,
        num_judged=3000,
        batch_size=16,
        num_epochs=2,
        peak_rate=5e-5,
        evaluations_per_epoch=2,
    ),
    "gpu": SST2["gpu"],
}
"""A network of 110 million parameters; tier 'long' would take a day."""

TAGS = {
    "smoke": FineTuning(
        longest=64,
        num_train=128,
        num_held_out=40,
        num_judged=60,
        batch_size=16,
        num_epochs=2,
        peak_rate=3e-4,
        evaluations_per_epoch=2,
    ),
    "cpu": FineTuning(
        longest=128, num_train=6000, num_held_out=400, num_judged=None, batch_size=32, num_epochs=3, peak_rate=2e-4
    ),
    "long": FineTuning(
        longest=128,
        num_train=None,
        num_held_out=400,
        num_judged=None,
        batch_size=16,
        num_epochs=10,
        peak_rate=1e-4,
        evaluations_per_epoch=1,
    ),
    "gpu": FineTuning(
        longest=128,
        num_train=None,
        num_held_out=None,
        num_judged=None,
        batch_size=16,
        num_epochs=10,
        peak_rate=5e-5,
        evaluations_per_epoch=1,
    ),
}

PAIRS = {
    "smoke": PairRecipe(
        longest=96,
        longest_paragraph=300,
        num_train=64,
        num_held_out=24,
        num_judged=40,
        batch_size=8,
        num_epochs=2,
        peak_rate=1e-4,
        evaluations_per_epoch=1,
    ),
    "cpu": PairRecipe(
        longest=144,
        longest_paragraph=600,
        num_train=3200,
        num_held_out=400,
        num_judged=3000,
        batch_size=16,
        num_epochs=2,
        peak_rate=1e-4,
    ),
    "long": PairRecipe(
        longest=144,
        longest_paragraph=600,
        num_train=12_000,
        num_held_out=400,
        num_judged=3000,
        batch_size=16,
        num_epochs=3,
        peak_rate=5e-5,
        evaluations_per_epoch=3,
    ),
    "gpu": PairRecipe(
        longest=256,
        longest_paragraph=1000,
        num_train=None,
        num_held_out=1000,
        num_judged=None,
        batch_size=32,
        num_epochs=2,
        peak_rate=3e-5,
    ),
}
"""Whether a paragraph answers a question."""

TOPICS = {
    "smoke": TopicRecipe(
        num_topics=8,
        longest=40,
        num_train=160,
        num_held_out=60,
        num_judged=100,
        batch_size=16,
        num_epochs=2,
        peak_rate=3e-4,
        evaluations_per_epoch=2,
    ),
    "cpu": TopicRecipe(
        num_topics=100,
        longest=64,
        num_train=8000,
        num_held_out=400,
        num_judged=3000,
        batch_size=32,
        num_epochs=4,
        peak_rate=2e-4,
    ),
    "long": TopicRecipe(
        num_topics=None,
        longest=64,
        num_train=None,
        num_held_out=400,
        num_judged=8000,
        batch_size=32,
        num_epochs=3,
        peak_rate=1e-4,
        evaluations_per_epoch=2,
    ),
    "gpu": TopicRecipe(
        num_topics=None,
        longest=64,
        num_train=None,
        num_held_out=1000,
        num_judged=8000,
        batch_size=32,
        num_epochs=5,
        peak_rate=5e-5,
    ),
}
"""Which article a question is about."""

CHARACTERS = {
    "smoke": GptRecipe(
        width=32,
        num_heads=2,
        num_layers=4,
        dropout=0.0,
        length=32,
        num_train=8_000,
        num_held_out=2_000,
        batch_size=8,
        num_epochs=2,
        peak_rate=1e-3,
        evaluations_per_epoch=1,
    ),
    "cpu": GptRecipe(
        width=128,
        num_heads=4,
        num_layers=4,
        dropout=0.0,
        length=64,
        num_train=1_000_000,
        num_held_out=100_000,
        batch_size=16,
        num_epochs=2,
        peak_rate=1e-3,
    ),
    "gpu": GptRecipe(
        width=384,
        num_heads=6,
        num_layers=6,
        dropout=0.2,
        length=256,
        num_train=10_000_000,
        num_held_out=1_000_000,
        batch_size=64,
        num_epochs=8,
        peak_rate=1e-3,
    ),
}
"""A small GPT; tier 'gpu' has the size that is usual for a megabyte of plays, on ten."""

_NEWS_BODY = replace(CHARACTERS["cpu"], num_layers=6, num_train=3_000_000)
NEWS_BODIES = {
    "smoke": replace(CHARACTERS["smoke"], num_layers=6),
    "cpu": _NEWS_BODY,
    "gpu": CHARACTERS["gpu"],
}
_NEWS = replace(_NEWS_BODY, num_train=800_000, num_judged=320_000, peak_rate=5e-4)
NEWS = {
    "smoke": replace(NEWS_BODIES["smoke"], num_judged=4_000, peak_rate=5e-4),
    "cpu": _NEWS,
    "gpu": replace(CHARACTERS["gpu"], num_train=1_200_000, num_held_out=380_000, num_judged=320_000, peak_rate=3e-4),
}
"""A GPT that has learned Wikipedia by `NEWS_BODIES`, on news and debates."""
