"""What may stand behind `--policy`."""

import pytest
from benchmarks.proving import RefusedError
from benchmarks.proving.policies import parse_policies, parse_policy

pytestmark = pytest.mark.bench


def test_commas_part_policies_but_not_their_settings():
    found = parse_policies(["none,static:schedule=0.5:1+0.75:3,start=0.25,egeria", "default"])
    assert [policy.name for policy in found] == ["none", "static", "egeria", "default"]
    assert found[1].settings == {"policy": {"schedule": "0.5:1 0.75:3", "start": 0.25}}
    assert [policy.is_plain for policy in found] == [True, False, False, False]


def test_a_plan_is_given_as_one():
    for text in ["plan:plan=0.5:1+0.75:2", "static:plan=0.5:1+0.75:2", "static:schedule=0.5:1+0.75:2"]:
        assert parse_policy(text).attach_arguments() == {"plan": "0.5:1 0.75:2", "config": {}}
        more = parse_policy(f"{text},cache.enabled=true").attach_arguments()
        assert more == {"plan": "0.5:1 0.75:2", "config": {"cache": {"enabled": True}}}


def test_a_file_gives_settings_as_they_are(tmp_path):
    path = tmp_path / "wide.toml"
    path.write_text("[plasticity]\nwindow = 20\n")
    policy = parse_policy(str(path))
    assert (policy.text, policy.settings) == ("wide", {"plasticity": {"window": 20}})
    assert policy.attach_arguments() == {"config": {"plasticity": {"window": 20}}}


def test_what_is_no_policy_is_refused():
    for text in [
        *("", "none:a=1", "head-only:a=1", "static:schedule", "../away", "egeria:a.b.c=1", "absent.toml"),
        *(
            "short",
            "short:share=1.0",
            "short:share=0",
            "short:share=half",
            "short:cache.share=0.5",
            "short:share=0.5,a.b=1",
        ),
        *("static", "plan:start=0.5", "plan:plan=0.5", "hft:seed=1", "freezeout:start=1"),
        *("freezeout:shape=round", "freezeout:scaled=1", "autofreeze:percentile=101", "autofreeze:evaluations=1"),
    ]:
        with pytest.raises(RefusedError):
            parse_policy(text)
