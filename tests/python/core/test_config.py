from __future__ import annotations

import logging
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hororing import config
from hororing.config import documentation, forms
from hororing.config.knobs import KNOBS, Knob

DOCS = Path(__file__).parents[3] / "docs"


def value(name: str, **environ: str) -> object:
    return config.load(environ)[name]


def test_nothing_set_gives_the_documented_defaults():
    loaded = config.load({})
    assert loaded["FUSION_BYTES"] == 64 * 1024 * 1024
    assert loaded["CYCLE_TIME_MS"] is None  # 1 ms, or 5 with NCCL: the engine knows which
    assert loaded["CACHE_CAPACITY"] == 8192
    assert loaded["TIMEOUT_S"] == 300
    assert loaded["STALL_WARNING_S"] == 60
    assert loaded["STALL_SHUTDOWN_S"] == 0
    assert loaded["TIMELINE"] is None
    assert all(setting.source == "default" for setting in loaded.settings.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("67108864", 67108864),
        ("64MiB", 64 * 2**20),
        ("64 mib", 64 * 2**20),
        ("64MB", 64 * 10**6),
        ("1.5KiB", 1536),
        ("2G", 2 * 10**9),
        ("0", 0),
        ("17B", 17),
    ],
)
def test_bytes_with_and_without_units(text: str, expected: int):
    assert value("FUSION_BYTES", HORORING_FUSION_BYTES=text) == expected


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HORORING_FUSION_BYTES", "64 MegaBytes"),
        ("HORORING_FUSION_BYTES", "-1"),
        ("HORORING_FUSION_BYTES", "0.5"),
        ("HORORING_FUSION_BYTES", "2000GiB"),
        ("HORORING_CYCLE_TIME_MS", "fast"),
        ("HORORING_CYCLE_TIME_MS", "nan"),
        ("HORORING_CACHE_CAPACITY", "-5"),
        ("HORORING_CACHE_CAPACITY", "1e3"),
        ("HORORING_CACHE_CAPACITY", "1" * 400),
        ("HORORING_FUSION_BYTES", "1" * 400),
        ("HORORING_TIMEOUT_S", "1e999"),
        ("HORORING_REPRODUCIBLE", "maybe"),
        ("HORORING_TRANSPORT", "udp"),
        ("HORORING_LOG_LEVEL", "loud"),
        ("HORORING_CPU", "0,,1"),
        ("HORORING_GUARD", "many=3"),
        ("HORORING_GUARD", "every=100,on_nonfinite=stop"),
        ("HORORING_TIMELINE_STEPS", "5"),
        ("HORORING_TIMELINE_STEPS", "0:5"),
        ("HORORING_TIMELINE_STEPS", "6:5"),
        ("HOROVOD_FUSION_THRESHOLD", "64MB"),
    ],
)
def test_an_error_quotes_the_variable_the_text_and_the_accepted_form(variable: str, text: str):
    with pytest.raises(ValueError, match="expected") as caught:
        config.load({variable: text})
    assert f"{variable}={text!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("HORORING_FUSION_BYTE", "HORORING_FUSION_BYTES"),
        ("HORORING_FUSSION_BYTES", "HORORING_FUSION_BYTES"),
        ("HORORING_TIMLINE", "HORORING_TIMELINE"),
        ("HORORING_STALL_WARNING", "HORORING_STALL_WARNING_S"),
        ("HORORING_", "HORORING_GPU"),
    ],
)
def test_an_unknown_variable_is_an_error_with_the_nearest_name(wrong: str, right: str):
    with pytest.raises(ValueError, match=f"did you mean {right}\\?"):
        config.load({wrong: "1"})


def test_horovods_names_are_accepted_and_ours_wins():
    environ = {"HOROVOD_FUSION_THRESHOLD": "1000"}
    loaded = config.load(environ)
    assert loaded["FUSION_BYTES"] == 1000
    assert loaded.settings["FUSION_BYTES"].source == "HOROVOD_FUSION_THRESHOLD"
    assert value("FUSION_BYTES", HORORING_FUSION_BYTES="1KiB", **environ) == 1024


@pytest.mark.parametrize(
    ("environ", "name", "expected"),
    [
        ({"HOROVOD_CYCLE_TIME": "2.5"}, "CYCLE_TIME_MS", 2.5),
        ({"HOROVOD_CACHE_CAPACITY": "0"}, "CACHE_CAPACITY", 0),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, "STALL_WARNING_S", 0),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, "STALL_WARNING_S", 60),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}, "STALL_WARNING_S", 5),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7"}, "STALL_SHUTDOWN_S", 7),
        (
            {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7"},
            "STALL_SHUTDOWN_S",
            0,
        ),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, "FUSION_BYTES", 0),
        ({"HOROVOD_TIMELINE": "/tmp/t.json"}, "TIMELINE", "/tmp/t.json"),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, "TIMELINE", None),
        ({"HOROVOD_TIMELINE_MARK_CYCLES": "1"}, "TIMELINE_MARK_CYCLES", True),
        ({"HOROVOD_LOG_LEVEL": "TRACE"}, "LOG_LEVEL", "trace"),
        ({"HOROVOD_LOG_LEVEL": "fatal"}, "LOG_LEVEL", "fatal"),
        ({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, "DYNAMIC_PROCESS_SETS", True),
        ({"HOROVOD_LOG_HIDE_TIME": "1"}, "LOG_HIDE_TIME", True),
        ({"HOROVOD_THREAD_AFFINITY": "0,2"}, "CPU", (0, 2)),
    ],
)
def test_horovods_units_are_converted(environ: dict[str, str], name: str, expected: object):
    assert config.load(environ)[name] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", True), ("2", True), ("1 day", True), ("0", False), ("-1", False), ("true", False)],
)
def test_horovods_booleans_are_true_when_they_begin_with_a_positive_number(
    text: str, expected: bool
):
    assert value("LOG_HIDE_TIME", HOROVOD_LOG_HIDE_TIME=text) is expected


def test_who_asks_for_what_there_is_not_is_told_what_happens_instead():
    environ = {
        "HOROVOD_ENABLE_XLA_OPS": "1",
        "HOROVOD_CPU_OPERATIONS": "CCL",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_NUM_NCCL_STREAMS": "4",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "9",
    }
    assert config.load(environ)
    notes = config.horovod_notes(environ)
    assert [level for level, _ in notes] == [logging.WARNING] * 5
    assert "HOROVOD_NUM_NCCL_STREAMS=4 has no effect" in notes[2][1]
    assert "HORORING_TIMEOUT_S" in notes[3][1]
    assert "HOROVOD_AUTOTUNE=1 has no effect here: the defaults are as fast" in notes[0][1]
    assert "HOROVOD_CPU_OPERATIONS=CCL" in notes[1][1]
    assert "HOROVOD_ENABLE_XLA_OPS=1 has no effect here: no operation is" in notes[4][1]


def test_other_variables_without_a_meaning_share_one_line_that_has_no_values():
    environ = {
        "HOROVOD_BATCH_D2D_MEMCOPIES": "1",
        "HOROVOD_SECRET_KEY": "abc",
        "HOROVOD_NUM_NCCL_STREAMS": "1",
        # Variables with default values, empty ones, and supported ones cause no message.
        "HOROVOD_ENABLE_XLA_OPS": "0",
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_ELASTIC": " ",
        "HOROVOD_CYCLE_TIME": "2",
    }
    assert config.horovod_notes(environ) == [
        (
            logging.INFO,
            "ignored, since they have no meaning here: HOROVOD_BATCH_D2D_MEMCOPIES, "
            "HOROVOD_SECRET_KEY",
        )
    ]
    assert config.horovod_notes({}) == []


def test_steps_of_a_timeline_without_a_file_are_an_error():
    steps = {"HORORING_TIMELINE_STEPS": "100:110"}
    assert config.load({**steps, "HOROVOD_TIMELINE": "t.json"})["TIMELINE_STEPS"] == (100, 110)
    for file in ({}, {"HOROVOD_TIMELINE": "DYNAMIC"}):
        with pytest.raises(ValueError, match=r"STEPS=100:110 .* HORORING_TIMELINE names no file"):
            config.load({**steps, **file})


def test_an_empty_variable_counts_as_not_set():
    assert value("FUSION_BYTES", HORORING_FUSION_BYTES="") == 64 * 2**20
    assert value("FUSION_BYTES", HORORING_FUSION_BYTES=" ", HOROVOD_FUSION_THRESHOLD="3") == 3


def test_the_fingerprint_holds_what_ranks_must_share_and_nothing_else():
    lines = config.load({"HORORING_FUSION_BYTES": "1MiB"}).fingerprint().splitlines()
    assert "HORORING_CYCLE_TIME_MS=unset" in lines
    assert "HORORING_FUSION_BYTES=1MiB" in lines
    assert len(lines) == sum(knob.scope == "all" for knob in KNOBS)
    assert not any("LOG_LEVEL" in line or "TIMEOUT" in line for line in lines)


def test_a_core_for_every_local_rank_or_an_error():
    loaded = config.load({"HORORING_CPU": "4,6"})
    assert [loaded.core_for(0), loaded.core_for(1)] == [4, 6]
    assert config.load({}).core_for(3) == -1
    with pytest.raises(ValueError, match=r"HORORING_CPU='4,6' has no core for local rank 2"):
        loaded.core_for(2)


@given(st.data())
def test_every_shown_value_parses_back_to_itself(data: st.DataObject):
    knob = data.draw(st.sampled_from(KNOBS))
    strategies = {
        forms.BYTES: st.integers(0, 2**40),
        forms.BOOL: st.booleans(),
        forms.PATH: st.text(string.ascii_letters + "/._-", min_size=1),
        forms.NETWORKS: st.text(string.ascii_letters + "0123456789.,", min_size=1),
        forms.CORES: st.lists(st.integers(0, 99999), min_size=1, max_size=8).map(tuple),
        forms.STEPS: st.tuples(*2 * [st.integers(1, 10**9)]).map(sorted).map(tuple),
    }
    drawn = data.draw(strategies[knob.form]) if knob.form in strategies else knob.default
    environ = {"HORORING_TIMELINE": "needed by its steps", knob.variable: knob.show(drawn)}
    assert value(knob.name, **environ) == drawn


@given(st.sampled_from(KNOBS), st.text(max_size=20))
def test_any_text_is_a_value_or_an_error_that_quotes_it(knob: Knob, text: str):
    failure = ""
    try:
        config.load({"HORORING_TIMELINE": "needed by its steps", knob.variable: text})
    except ValueError as error:
        failure = str(error)
    assert not failure or f"{knob.variable}={text.strip()!r}" in failure


def test_the_document_is_up_to_date():
    expected = documentation.markdown()
    assert (DOCS / "configuration.md").read_text() == expected, "run: make docs"
