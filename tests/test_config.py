"""Settings: their defaults, what each refuses, and the ways in and out."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egeria import Config, ConfigError
from egeria.config import (
    CacheConfig,
    ControllerConfig,
    FreezingConfig,
    ModulesConfig,
    PlasticityConfig,
    PolicyConfig,
    UnfreezingConfig,
)

NO_SHARE = (0, -0.1, 1.5, math.nan, math.inf, "0.2", True, None)
SHARE = "a number above 0 and at most 1"
NOT_POSITIVE = (0, -1, math.nan, math.inf, "0.2", True, None)
POSITIVE = "a finite number above 0"


def no_count(at_least=1):
    return (at_least - 1, -1, float(at_least), True, str(at_least), math.nan)


# Every field that has a contract: what must be said of it, and values outside it.
CONTRACTS = [
    ("policy.name", "the name of a policy or a callable that makes one", (3, None, ["none"])),
    ("policy.plan", 'text such as "0.5:1 0.75:2"', (0.5, "0.5", "1.0:2")),  # more in test_plan
    ("policy.start", "a number from 0 to below 1", (-0.1, 1, math.nan, "0.5", True, None)),
    ("policy.pretrained", "true, false or 'auto'", ("false", 0, None)),
    ("modules.pattern", "a valid regular expression", ("(", "[", "a{99999999999999999999}", "(" * 5000, b"x", 3)),
    ("modules.keep", "a valid regular expression", ("(", 3)),
    ("modules.target_share", SHARE, NO_SHARE[:-1]),
    ("bootstrapping.change_threshold", SHARE, NO_SHARE),
    ("plasticity.interval_steps", "a whole number of at least 1", no_count()),
    ("plasticity.window", "a whole number of at least 2", (*no_count(2), None)),
    ("plasticity.num_samples", "a whole number of at least 2", (*no_count(2), None)),
    ("reference.precision", "one of 'auto', 'bf16', 'fp32', 'int8'", ("int7", None, 32)),
    ("reference.device", "one of 'auto', 'cpu', 'cuda'", ("gpu", None, 0)),
    ("controller.kind", "one of 'auto', 'inline', 'process'", ("thread", None, 1)),
    ("controller.budget_share", POSITIVE, NOT_POSITIVE),
    ("controller.load_limit", SHARE, NO_SHARE),
    ("controller.timeout_s", POSITIVE, NOT_POSITIVE),
    ("freezing.tolerance_share", POSITIVE, NOT_POSITIVE),
    ("freezing.tolerance_readings", "a whole number of at least 1", (*no_count(), None)),
    ("unfreezing.rule", "the name of a rule or an object with a `judge` method", (3, None, object)),
    ("unfreezing.drop_factor", "a finite number above 1", (1, 0.5, math.nan, math.inf, "10", True)),
    ("cache.enabled", "true, false or 'auto'", ("false", 0, None)),
    ("cache.memory_share", SHARE, NO_SHARE),
    ("cache.directory", "a local folder", ("", 3, True, "s3://bucket/run")),
    ("cache.limit_bytes", "a whole number of at least 1", no_count()),
    ("cache.gate", "one of 'auto', 'open'", ("closed", None, True)),
    ("cache.verify_batches", "a whole number of at least 1", (*no_count(), None)),
]


def test_every_setting_has_a_contract_that_is_tested_here():
    assert [setting for setting, _, _ in CONTRACTS] == [
        f"{group}.{name}" for group, values in Config().to_dict().items() for name in values
    ]


def test_a_value_outside_its_contract_is_refused_with_contract_value_and_next_step():
    for setting, contract, values in CONTRACTS:
        group, name = setting.split(".")
        for value in values:
            with pytest.raises(ConfigError) as refusal:
                Config.from_dict({group: {name: value}})
            message = str(refusal.value)
            assert message.startswith(f"{setting} must be {contract}") and f"found {value!r}"[:100] in message
            assert message.endswith("Correct it in the code or the TOML file that sets it.")


def test_unknown_groups_and_fields_are_refused_beside_the_known_ones():
    for table, said in [
        ({"plasticty": {}}, ["the configuration knows", "'plasticty'", "Did you mean 'plasticity'?"]),
        ({"plasticity": {"windw": 3}}, ["[plasticity] knows", "'windw'", "Did you mean 'window'?"]),
        ({"cache": {"a": 1, "b": 2}}, ["[cache] knows directory", "'a', 'b'"]),
        ({1: {}, "x": {}}, ["the configuration knows", "'x'", "'1'", "Check the spelling"]),
        ({"freezing": False}, ["freezing must be a table", "found False", "below [freezing]"]),
        ({"freezing": None}, ["freezing must be a table", "found None"]),
        ({"policy": "static"}, ["found 'static'", "Write {'policy': {'name': 'static'}}", "below [policy]"]),
    ]:
        with pytest.raises(ConfigError) as refusal:
            Config.from_dict(table)
        assert all(part in str(refusal.value) for part in said), str(refusal.value)


def test_toml_reads_like_the_dictionary():
    text = "[plasticity]\nwindow = 4\n[freezing]\ntolerance_share = 0.5\n"
    assert Config.from_toml(text) == Config(
        plasticity=PlasticityConfig(window=4), freezing=FreezingConfig(tolerance_share=0.5)
    )
    assert Config.from_toml("") == Config()


def test_an_error_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("[plasticity]\nwindow = 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"settings\.toml must be .*: plasticity\.window must be .*found 1\."):
        Config.load(path)
    path.write_text("[plasticity\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"settings\.toml must be .*must be TOML"):
        Config.load(path)


counts = st.integers(1, 10**12)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
configs = st.builds(
    Config,
    policy=st.builds(
        PolicyConfig,
        name=texts.filter(lambda name: name not in ("static", "egeria", "none")),
        plan=st.none() | st.sampled_from(["", "0.5:2", " 0.25:1  0.5:0 step 7:1 "]),
        pretrained=st.sampled_from(["auto", True, False]),
    ),
    modules=st.builds(
        ModulesConfig,
        pattern=st.none() | st.sampled_from(["", r"layer\d+", "a|\"b'", "\\\\", "é\n\t#", "[a-z]{2}"]),
        target_share=st.floats(0, 1, exclude_min=True),
    ),
    plasticity=st.builds(PlasticityConfig, interval_steps=st.none() | counts),
    controller=st.builds(ControllerConfig, budget_share=st.floats(0, exclude_min=True, allow_infinity=False)),
    unfreezing=st.builds(UnfreezingConfig, rule=texts),
    cache=st.builds(CacheConfig, enabled=st.booleans(), directory=st.none() | texts.filter(bool)),
)


@given(configs)
def test_the_dictionary_of_settings_gives_them_again(settings):
    assert Config.from_dict(settings.to_dict()) == settings
