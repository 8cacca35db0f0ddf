"""Answers to the panel: what they say is checked against numbers chosen here and against rlkit's own advantages."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from run_folders import HOSTILE, PROMPTS, hostile_rows, rows, write_metrics, write_rollout, write_run, write_state

import rlkit as rl
from rlkit.record import printable
from rlkit.run.reader import RunReader
from rlkit.view import completions, panel_data
from rlkit.view.arithmetic import leave_one_out
from rlkit.view.json_values import number, plain, short
from rlkit.view.panel_data import answer
from rlkit.view.table_query import OPERATORS

SHOWN = 1e-6  # answers keep seven digits


def through_json(found):
    """As a browser gets it: strict JSON."""
    return json.loads(json.dumps(found, allow_nan=False))


def ask(readers, **request):
    return through_json(answer(readers, request))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RunReader(write_run(tmp_path_factory.mktemp("runs") / "first", steps=4))


@pytest.fixture
def folder(tmp_path):
    """An empty run."""
    return write_run(tmp_path / "run", steps=0)


def one_step(folder: Path, table, step=0):
    write_rollout(folder, step, table)
    return RunReader(folder)


def column(found, name):
    place = [one["name"] for one in found["columns"]].index(name)
    return [row["cells"][place] for row in found["rows"]]


# ------------------------------------------------------------------ overview and steps


def test_overview_says_where_every_run_stands(run, folder):
    found = ask([run, RunReader(folder)], kind="overview")["runs"]
    assert [one["steps"] for one in found] == [[0, 1, 2, 3], []]
    assert found[0]["status"] == "running" and found[0]["step"] == 4 and found[0]["max_steps"] == 60
    assert found[0]["numbers"] == {"beta": 0.02, "learning_rate": 0.0003}
    assert abs(found[0]["time"] - json.loads((run.path / "state.json").read_text())["time"]) <= 1


def test_a_run_without_completions_has_an_empty_table(folder):
    found = ask([RunReader(folder)], kind="table")
    assert found["step"] is None and found["rows"] == [] and found["total"] == 0


def test_a_step_that_is_not_stored_is_replaced_by_the_nearest_and_that_is_said(folder):
    for step in (0, 10, 20):
        write_rollout(folder, step, rows(step))
    found = ask([RunReader(folder)], kind="table", step=12)
    assert found["step"] == 10 and "step 12" in found["said"] and "step 10" in found["said"]
    assert ask([RunReader(folder)], kind="table", step=None)["step"] == 20


def test_a_torn_file_is_an_empty_step_with_a_word(folder):
    write_rollout(folder, 0, rows(0))
    file = next((folder / "rollouts").glob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-40])
    found = ask([RunReader(folder)], kind="table")
    assert found["rows"] == [] and "cannot be read" in found["said"]
    with pytest.raises(ValueError, match="no row 0"):
        ask([RunReader(folder)], kind="lens", step=0, row=0)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"kind": "nonsense"}, "unknown request 'nonsense'"),
        ({"kind": "table", "run": 7}, "no run 7"),
        ({"kind": "table", "sort": "nope"}, "no column 'nope'"),
        ({"kind": "table", "step": "two"}, "expected a step number"),
        ({"kind": "table", "where": [{"column": "reward", "op": "~", "value": 1}]}, "unknown operator '~'"),
        ({"kind": "table", "where": [{"column": "reward", "op": ">=", "value": "much"}]}, "expected a number"),
        ({"kind": "lens", "step": 0, "row": 999}, "no row 999"),
        ({"kind": "text", "step": 0, "row": 0, "column": "nope"}, "no column 'nope'"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(run, request_, said):
    with pytest.raises(ValueError, match=said):
        answer([run], request_)


# ------------------------------------------------------------------ sort and filter


def test_rows_sort_in_both_directions_and_the_missing_come_last(folder):
    table = rows(0)[:5]
    for row, reward in zip(table, [1.0, math.nan, 3.0, None, 2.0], strict=True):
        row["reward"] = reward
    reader = one_step(folder, table)
    up = ask([reader], kind="table", sort="reward", descending=False)
    down = ask([reader], kind="table", sort="reward", descending=True)
    assert column(up, "reward") == [1.0, 2.0, 3.0, "NaN", "NaN"]
    assert column(down, "reward") == [3.0, 2.0, 1.0, "NaN", "NaN"]
    assert [row["row"] for row in up["rows"]] == [0, 4, 2, 1, 3]  # stable among the missing


def test_texts_sort_without_regard_to_case(folder):
    table = rows(0)[:4]
    for row, text in zip(table, ["b", "C", "a", "A"], strict=True):
        row["completion"] = text
    assert column(ask([one_step(folder, table)], kind="table", sort="completion"), "completion") == ["a", "A", "b", "C"]


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ({"column": "reward", "op": ">=", "value": "0.5"}, [1, 2]),
        ({"column": "reward", "op": "<=", "value": 0.5}, [0, 1]),
        ({"column": "reward", "op": "=", "value": "1"}, [2]),
        ({"column": "reward", "op": "!=", "value": "1"}, [0, 1, 3]),
        ({"column": "reward", "op": "missing", "value": ""}, [3]),
        ({"column": "answer", "op": "=", "value": "X"}, [0]),
        ({"column": "answer", "op": "contains", "value": "y"}, [1, 2]),
        ({"column": "truncated", "op": "=", "value": "true"}, [2]),
        ({"column": "rewards/correct", "op": ">=", "value": "1"}, [1]),
    ],
)
def test_a_condition_keeps_what_meets_it(folder, where, kept):
    table = rows(0)[:4]
    for row, reward, word in zip(table, [0.0, 0.5, 1.0, math.nan], ["x", "y", "ny", None], strict=True):
        row |= {"reward": reward, "answer": word, "truncated": reward == 1.0, "rewards/correct": float(reward == 0.5)}
    found = ask([one_step(folder, table)], kind="table", where=[where])
    assert [row["row"] for row in found["rows"]] == kept and found["found"] == len(kept) and found["total"] == 4


def test_text_is_looked_for_in_prompt_and_completion_beyond_what_is_shown(folder):
    table = rows(0)[:3]
    table[0]["completion"] = "x" * 5000 + "Needle"
    table[1]["prompt"] = "a needle in the prompt"
    found = ask([one_step(folder, table)], kind="table", text="NEEDLE")
    assert [row["row"] for row in found["rows"]] == [0, 1]


def test_pages_cover_every_row_once(run):
    pages = [ask([run], kind="table", sort="advantage", offset=offset, limit=5) for offset in (0, 5, 10, 15)]
    seen = [row["row"] for page in pages for row in page["rows"]]
    assert sorted(seen) == list(range(16)) and all(page["found"] == 16 for page in pages)
    values = [value for page in pages for value in column(page, "advantage")]
    assert values == sorted(values)


# ------------------------------------------------------------------ bounds


@pytest.mark.slow
def test_answers_stay_small_whatever_the_rollout_holds(folder):
    table = rows(0, prompts=["p" * 50_000] * 50, num_generations=8, texts=["z" * 2_000] * 400)
    for row in table:
        row |= {f"extra {i}": "q" * 1000 for i in range(100)}
    reader = one_step(folder, table)
    for request in (
        {"kind": "table"}, {"kind": "group", "step": 0, "row": 0}, {"kind": "lens", "step": 0, "row": 0},
        {"kind": "text", "step": 0, "row": 0, "column": "prompt"}, {"kind": "pin", "row_id": 0},
        {"kind": "compare", "left": {"step": 0}, "right": {"step": 0}},
    ):  # fmt: skip
        assert len(json.dumps(answer([reader], request))) < 300_000, request


def test_a_text_that_is_cut_says_its_length_and_opens_whole(folder):
    text = "".join(f"{i} " for i in range(20_000))
    table = rows(0)[:1]
    table[0]["completion"] = text
    reader = one_step(folder, table)
    found = ask([reader], kind="table")
    [cell] = column(found, "completion")
    assert cell["length"] == len(text) and text.startswith(cell["text"]) and found["cut"]
    whole, offset = "", 0
    while offset < len(text):
        page = ask([reader], kind="text", step=0, row=0, column="completion", offset=offset)
        whole, offset = whole + page["text"], offset + page["page"]
        assert page["length"] == len(text)
    assert whole == text


def test_long_completions_are_paged_and_pages_join(folder):
    table = rows(0, texts=["abc" * 999] * 16)
    reader = one_step(folder, table)
    pages = [ask([reader], kind="lens", step=0, row=0, page=page) for page in range(3)]
    assert pages[0]["pages"] == 3 and [page["first"] for page in pages] == [0, 400, 800]
    assert [token for page in pages for token in page["tokens"]] == table[0]["tokens"]
    assert len({json.dumps([one["scale"] for one in page["quantities"]]) for page in pages}) == 1  # one scale for all


# ------------------------------------------------------------------ hostile texts and numbers


def test_hostile_texts_come_through_unchanged_as_json_strings(folder):
    reader = one_step(folder, hostile_rows(0))
    for row, text in enumerate(HOSTILE.values()):
        page = ask([reader], kind="text", step=0, row=row, column="completion")
        assert page["text"] == text[: completions.TEXT] and page["length"] == len(text)
    found = ask([reader], kind="table")
    assert column(found, "reward")[:2] == ["NaN", "NaN"]
    assert column(found, "kl")[1] == "inf" and column(found, "ratio")[2] == "-inf"
    for row in range(12):
        ask([reader], kind="group", step=0, row=row)
        ask([reader], kind="lens", step=0, row=row)


@given(st.text(alphabet=st.characters(), max_size=60))
def test_any_text_survives_json_and_utf8(text):
    assert printable(text).encode("utf-8").decode("utf-8") == printable(text)
    assert printable(text) == "".join("\ufffd" if 0xD800 <= ord(one) < 0xE000 else one for one in text)
    cut = short(text, 7)
    assert through_json(cut) == cut
    if len(text) > 7:
        assert cut["length"] == len(text) and printable(text[:7]) == cut["text"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9) | st.binary(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    )
)
def test_any_value_of_a_column_becomes_strict_json(value):
    found = plain(value)
    json.dumps(found, allow_nan=False).encode("utf-8")
    assert found is None or isinstance(found, bool | int | float | str)


@given(st.floats())
@example(math.nan)
@example(-math.inf)
def test_a_number_keeps_seven_digits_or_says_what_it_is(value):
    found = number(value)
    if math.isfinite(value):
        assert found == pytest.approx(value, rel=1e-6, abs=0)
    else:
        assert found == ("NaN" if math.isnan(value) else "inf" if value > 0 else "-inf")


@given(
    st.lists(st.floats() | st.none(), min_size=1, max_size=6),
    st.sampled_from(OPERATORS),
    st.floats(allow_nan=False),
)
def test_no_number_in_a_column_breaks_sort_or_filter(values, op, bound):
    import pandas as pd

    from rlkit.view.table_query import select

    frame = pd.DataFrame({"row": range(len(values)), "x": pd.array(values, dtype="object")}).astype({"x": float})
    kept = select(frame, sort="x", descending=True, where=[{"column": "x", "op": op, "value": bound}], text="")
    known = [value for value in kept["x"] if not math.isnan(value)]
    assert known == sorted(known, reverse=True)
    if op in (">=", "<=", "="):
        wanted = [v for v in values if v is not None and not math.isnan(v)]
        wanted = [v for v in wanted if (v >= bound if op == ">=" else v <= bound if op == "<=" else v == bound)]
        assert sorted(known) == sorted(wanted)


# ------------------------------------------------------------------ the group's arithmetic


def group_of(reader, step=0, row=0):
    return ask([reader], kind="group", step=step, row=row)


def with_advantage(table, advantage):
    for row, value in zip(table, np.asarray(advantage, dtype=float), strict=True):
        row["advantage"] = float(value)
    return table


def loo(table, beta=0.0):
    """rlkit's own advantages of a table, in float64."""
    kl = torch.tensor([row["kl"] for row in table], dtype=torch.float64)
    reward = torch.tensor([row["reward"] for row in table], dtype=torch.float64)
    return rl.compute_loo_advantage(reward, group_id=[row["group_id"] for row in table], kl=kl, beta=beta).numpy()


def test_a_group_by_hand(folder):
    """Rewards 1, 0, 0.5: the others of the first have mean 0.25, so its advantage is 0.75."""
    table = rows(0, prompts=PROMPTS[:1], num_generations=3)
    for row, reward, kl in zip(table, [1.0, 0.0, 0.5], [0.0, 0.0, 0.0], strict=True):
        row |= {"reward": reward, "kl": kl}
    found = group_of(one_step(folder, with_advantage(table, [0.75, -0.75, 0.0])))
    first = found["rows"][0]
    assert first["others"] == [0.0, 0.5] and first["count"] == 2 and first["total"] == 1.5
    assert (first["r"], first["mean"], first["advantage"], first["stored"]) == (1.0, 0.25, 0.75, 0.75)
    assert [row["advantage"] for row in found["rows"]] == [0.75, -0.75, 0.0]
    assert found["rule"] == "leave-one-out" and all(row["agrees"] for row in found["rows"])


@pytest.mark.parametrize("beta", [0.0, 0.02, 0.5])
def test_the_sums_are_rlkits_advantages(folder, beta):
    table = rows(0, beta=beta)
    write_metrics(folder, 0, table, **{"knobs/beta": beta})
    reader = one_step(folder, with_advantage(table, loo(table, beta)))
    for row in range(0, 16, 4):
        found = group_of(reader, row=row)
        assert found["rule"] == "leave-one-out" and found["beta"] == (beta or None)
        assert [one["advantage"] for one in found["rows"]] == pytest.approx(loo(table, beta)[row : row + 4], abs=1e-5)
        for one in found["rows"]:
            assert one["r"] - one["mean"] == pytest.approx(one["advantage"], abs=1e-5)
            assert sum(one["others"]) / one["count"] == pytest.approx(one["mean"], abs=1e-5)
            assert (one["total"] - one["r"]) / one["count"] == pytest.approx(one["mean"], abs=1e-5)


def test_a_beta_that_nobody_wrote_down_is_found_in_the_advantages(tmp_path):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    table = rows(0)
    found = group_of(one_step(folder, with_advantage(table, loo(table, 0.3))))
    assert found["rule"] == "leave-one-out" and found["beta"] == pytest.approx(0.3, rel=1e-3)
    assert "not written anywhere" in found["explained"]


def test_the_beta_of_the_step_wins_over_the_one_of_now(folder):
    table = rows(0)
    write_metrics(folder, 0, table, **{"knobs/beta": 0.4})
    write_state(folder, 1, beta=0.01)
    found = group_of(one_step(folder, with_advantage(table, loo(table, 0.4))))
    assert found["beta"] == pytest.approx(0.4) and "metrics" in found["explained"]


def test_a_beta_that_does_not_belong_to_the_advantages_is_not_believed(folder):
    """config.json says beta = 0.02, but the loop took no KL into the reward."""
    table = rows(0)
    for row in table:
        row["kl"] *= 100
    found = group_of(one_step(folder, with_advantage(table, loo(table))))
    assert found["rule"] == "leave-one-out" and found["beta"] is None and "without a KL" in found["explained"]


def test_rows_without_a_reward_are_named_and_out_of_every_mean(folder):
    table = rows(0, prompts=PROMPTS[:1], num_generations=4)
    for row, reward in zip(table, [1.0, math.nan, 0.0, 0.5], strict=True):
        row |= {"reward": reward, "kl": 0.0}
    advantage = rl.compute_loo_advantage(torch.tensor([1.0, math.nan, 0.0, 0.5]), group_id=[0] * 4)
    found = group_of(one_step(folder, with_advantage(table, advantage)))
    assert found["rule"] == "leave-one-out"
    lost = found["rows"][1]
    assert not lost["scored"] and lost["r"] == "NaN" and lost["advantage"] == 0 and lost["agrees"]
    assert found["rows"][0]["others"] == [0.0, 0.5] and found["rows"][0]["mean"] == 0.25


def test_a_single_scored_row_has_nothing_to_compare_with(folder):
    table = rows(0, prompts=PROMPTS[:1], num_generations=2)
    table[0]["reward"] = math.nan
    found = group_of(one_step(folder, with_advantage(table, [0, 0])))
    assert found["rule"] == "alone" and [row["count"] for row in found["rows"]] == [0, 0]


def test_a_star_po_is_a_baseline_of_the_prompt_and_no_sum_of_others(folder):
    table = rows(0)
    v_star = np.repeat([0.3, 0.6, 0.9, 0.1], 4)
    found = group_of(one_step(folder, with_advantage(table, [row["reward"] for row in table] - v_star)), row=4)
    assert found["rule"] == "baseline" and "0.6 in every row" in found["explained"] and "V*" in found["explained"]


def test_reward_minus_the_groups_mean_is_not_taken_for_leave_one_out(folder):
    table = rows(0, num_generations=4)
    rewards = np.array([row["reward"] for row in table]) + np.tile([0.0, 0.3, 0.7, 0.2], 4)
    for row, reward in zip(table, rewards, strict=True):
        row["reward"] = float(reward)
    found = group_of(one_step(folder, with_advantage(table, rewards - np.repeat(rewards.reshape(4, 4).mean(1), 4))))
    assert found["rule"] == "mean" and "not leave-one-out" in found["explained"]
    assert not all(row["agrees"] for row in found["rows"])


def test_normalised_advantages_are_named(folder):
    table = rows(0)
    kl = torch.tensor([row["kl"] for row in table])
    reward = torch.tensor([row["reward"] for row in table])
    group_id = [row["group_id"] for row in table]
    stored = rl.compute_loo_advantage(reward, group_id=group_id, kl=kl, beta=0.02, normalize=True)
    found = group_of(one_step(folder, with_advantage(table, stored)))
    assert found["rule"] == "normalised" and "batch" in found["explained"]
    slope = 1 / (loo(table, 0.02).std(ddof=1) + 1e-4)
    assert f"{slope:.3g}" in found["explained"]


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_a_large_common_reward_hides_no_rule(folder, offset):
    """Relative to 1e6, every reward is the same baseline plus its advantage."""
    rewards = np.array([0.0, 0.5, 0.0, 0.25])
    own = leave_one_out(rewards)
    rules = {
        "leave-one-out": own,
        "normalised": own / own.std(),
        "mean": rewards - rewards.mean(),
        "baseline": rewards - 0.1,
        "other": np.array([1.0, -1.0, 2.0, 0.3]),
    }
    for rule, stored in rules.items():
        table = with_advantage(rows(0, prompts=PROMPTS[:1], num_generations=4), stored)
        for row, reward in zip(table, rewards + offset, strict=True):
            row |= {"reward": float(reward), "kl": 0.0}
        assert group_of(one_step(folder, table))["rule"] == rule


def test_advantages_that_nothing_explains_are_said_to_be_so(folder):
    table = rows(0)
    found = group_of(one_step(folder, with_advantage(table, np.random.default_rng(0).normal(size=16))))
    assert found["rule"] == "other" and "do not follow" in found["explained"]
    assert not any(row["agrees"] for row in found["rows"])


def test_a_large_group_is_written_as_the_sum_without_ones_own(folder):
    table = rows(0, prompts=PROMPTS[:1], num_generations=20)
    found = group_of(one_step(folder, table))
    assert all(row["others"] is None and row["count"] == 19 for row in found["rows"])


# ------------------------------------------------------------------ the token lens


def lens_of(reader, row=0):
    found = ask([reader], kind="lens", step=0, row=row)
    return found, {one["name"]: one for one in found["quantities"]}


def test_every_quantity_is_what_it_says(folder):
    table = rows(0)
    for name in ("sampler_logp", "logp", "old_logp", "ref_logp", "new_logp", "entropy"):
        table[0][name] = [float(np.float32(value)) for value in table[0][name]]
    row = table[0]
    row |= {"old_logp": [value - 0.25 for value in row["logp"]], "advantage": -0.7}
    found, by_name = lens_of(one_step(folder, table))
    columns = {name: np.array(row[name]) for name in ("sampler_logp", "logp", "old_logp", "ref_logp", "new_logp")}
    expected = {
        "credit": row["advantage"] * (columns["new_logp"] - columns["old_logp"]),
        "log-ratio": columns["logp"] - columns["ref_logp"],
        "entropy": np.array(row["entropy"]),
        "ratio": np.exp(columns["logp"] - columns["old_logp"]),
        "sampler gap": columns["logp"] - columns["sampler_logp"],
        "surprise": -columns["logp"],
    }
    assert list(by_name) == list(expected)
    for name, values in expected.items():
        assert by_name[name]["values"] == pytest.approx(values, abs=1e-6), name
        total = values.prod() if name == "ratio" else values.sum()  # the row's ratio is the product of its tokens'
        assert by_name[name]["total"] == pytest.approx(total, rel=1e-5, abs=1e-5), name
    assert by_name["ratio"]["scale"] == pytest.approx(0.25, abs=1e-6)  # of the logarithm: double is as strong as half
    assert found["about"]["advantage"] == pytest.approx(row["advantage"], rel=SHOWN)


def test_credit_falls_back_to_the_reference_and_says_so(folder):
    table = rows(0)
    for row in table:
        row["new_logp"] = None
    _, by_name = lens_of(one_step(folder, table))
    row = table[0]
    wanted = row["advantage"] * (np.array(row["logp"]) - np.array(row["ref_logp"]))
    assert by_name["credit"]["values"] == pytest.approx(wanted, abs=1e-5)
    assert "log π_ref" in by_name["credit"]["label"] and "not stored" in by_name["credit"]["label"]


def test_what_was_not_logged_is_missing_with_a_reason(folder):
    table = rows(0)
    for row in table:
        for name in ("new_logp", "ref_logp", "entropy", "logp", "old_logp", "tokens", "advantage"):
            row[name] = None
    found, by_name = lens_of(one_step(folder, table))
    assert found["tokens"] == [str(one) for one in table[0]["token_ids"]]
    for name in ("credit", "log-ratio", "entropy", "ratio", "sampler gap"):
        assert by_name[name]["values"] is None and by_name[name]["why"], name
    assert by_name["surprise"]["values"] == pytest.approx([-value for value in table[0]["sampler_logp"]], abs=1e-6)


def test_masked_tokens_do_not_set_the_scale(folder):
    table = rows(0)
    table[0]["loss_mask"] = [True] * (table[0]["length"] - 1) + [False]
    table[0]["entropy"] = [0.5] * (table[0]["length"] - 1) + [1e6]
    table[1]["entropy"] = [math.inf, math.nan] + [0.25] * (table[1]["length"] - 2)
    reader = one_step(folder, table)
    found, by_name = lens_of(reader)
    assert by_name["entropy"]["scale"] == pytest.approx(0.5) and found["mask"][-1] is False
    assert by_name["entropy"]["total"] == pytest.approx(0.5 * (table[0]["length"] - 1))
    _, by_name = lens_of(reader, row=1)
    assert by_name["entropy"]["values"][:2] == ["inf", "NaN"] and by_name["entropy"]["scale"] == pytest.approx(0.25)


# ------------------------------------------------------------------ pins, comparison, bundle


def test_a_pinned_prompt_shows_its_answers_newest_first(run):
    found = ask([run], kind="pin", row_id=2)
    assert [one["step"] for one in found["steps"]] == [3, 2, 1, 0] and found["prompt"] == PROMPTS[2]
    wanted = rows(3)[8:12]
    assert [row["completion"] for row in found["steps"][0]["rows"]] == [row["completion"] for row in wanted]
    assert found["steps"][0]["mean"] == pytest.approx(np.mean([row["reward"] for row in wanted]), rel=SHOWN)
    assert ask([run], kind="pin", row_id=99)["steps"] == []


def test_old_steps_of_a_pin_come_in_further_answers(folder):
    for step in range(30):
        write_rollout(folder, step, rows(step, prompts=PROMPTS[:1], num_generations=2))
    reader = RunReader(folder)
    first = ask([reader], kind="pin", row_id=0)
    second = ask([reader], kind="pin", row_id=0, before=first["older"])
    steps = [one["step"] for found in (first, second) for one in found["steps"]]
    assert steps == list(range(29, -1, -1)) and second["older"] is None


def test_two_steps_are_matched_by_row_id(folder):
    write_rollout(folder, 0, rows(0, first_row_id=0))
    write_rollout(folder, 1, rows(1, first_row_id=2, prompts=[*PROMPTS[2:], "new one", "another"]))
    found = ask([RunReader(folder)], kind="compare", left={"step": 0}, right={"step": 1})
    assert found["shared"] == 2 and {one["row_id"] for one in found["prompts"]} == {2, 3}
    changes = [abs(one["change"]) for one in found["prompts"]]
    assert changes == sorted(changes, reverse=True)
    for one in found["prompts"]:
        assert one["right"]["mean"] - one["left"]["mean"] == pytest.approx(one["change"], abs=1e-6)


def test_a_row_id_of_another_prompt_is_no_match(folder):
    """Two runs on different data have row ids in common that mean nothing."""
    write_rollout(folder, 0, rows(0, prompts=["one", "two"]))
    write_rollout(folder, 1, rows(1, prompts=["three", "two"]))
    found = ask([RunReader(folder)], kind="compare", left={"step": 0}, right={"step": 1})
    assert [one["prompt"] for one in found["prompts"]] == ["two"]


def test_a_bundle_stays_within_its_bytes_and_says_what_is_left_out(run):
    whole = panel_data.bundle([run])
    assert whole["left_out"] == 0
    assert {key.split()[0] for key in whole["answers"]} == {"table", "lens", "group"}
    assert whole["answers"]["lens 0 3 5"] == answer([run], {"kind": "lens", "run": 0, "step": 3, "row": 5})
    part = panel_data.bundle([run], max_bytes=len(json.dumps(whole)) // 2)
    assert len(json.dumps(part)) <= len(json.dumps(whole)) // 2 and 0 < part["left_out"] < 4
    assert part["overview"]["runs"][0]["steps"] == [0, 1, 2, 3][part["left_out"] :]


# ------------------------------------------------------------------ a folder that rlkit itself wrote


@pytest.fixture(scope="module")
def trained(tmp_path_factory, frozen_policy):
    """Two steps of RLOO with the KL in the reward, by the library itself."""
    from builders import tiny_policy

    policy = tiny_policy()
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-2)
    run = rl.Run(tmp_path_factory.mktemp("runs") / "real")
    prompts = [{"prompt": "ab", "answer": "x"}, {"prompt": "cd", "answer": "y"}]

    def vowels(completions, **_):
        return [float(sum(one in "aeiou" for one in text)) for text in completions]

    for step in range(2):
        batch = rl.make_batch(policy, prompts)
        rollout = rl.sample(policy, batch, num_generations=4, max_completion_length=6, seed=step)
        scores = rl.score(rollout, vowels)
        ref_logps = rl.compute_logps(frozen_policy, rollout)
        advantages = rl.compute_loo_advantage(scores, kl=rl.compute_kl(rollout, ref_logps), beta=0.1)
        update = rl.loss_step(policy, optimizer, rollout, advantages, loss=rl.RLOO(epsilon=0.2))
        new_logps = rl.compute_logps(policy, rollout)
        run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps, new_logps=new_logps)
    return RunReader(run.path), rollout, scores, advantages, update, ref_logps, new_logps


def test_a_real_run_in_the_table_and_the_group(trained):
    reader, rollout, scores, advantages, *_ = trained
    found = ask([reader], kind="table")
    assert found["step"] == 1 and column(found, "completion") == list(rollout.completions)
    assert column(found, "reward") == pytest.approx(scores.reward.tolist())
    assert column(found, "advantage") == pytest.approx(advantages.tolist(), abs=1e-6)
    assert column(found, "answer") == ["x"] * 4 + ["y"] * 4
    members = ask([reader], kind="group", step=1, row=5)
    assert [row["row"] for row in members["rows"]] == [4, 5, 6, 7] and members["rule"] == "leave-one-out"
    assert members["beta"] == pytest.approx(0.1, rel=1e-3)  # written nowhere: it follows from the numbers
    assert [row["advantage"] for row in members["rows"]] == pytest.approx(advantages[4:].tolist(), abs=1e-4)


def test_a_real_run_in_the_lens(trained):
    reader, rollout, _, advantages, update, ref_logps, new_logps = trained
    for row in range(len(rollout)):
        found = ask([reader], kind="lens", step=1, row=row)
        mask = rollout.completion_mask[row]
        assert found["ids"] == rollout.completion_ids[row][mask].tolist()
        by_name = {one["name"]: one["values"] for one in found["quantities"]}
        moved = (new_logps - update.old_logp)[row][mask] * advantages[row]
        assert by_name["credit"] == pytest.approx(moved.tolist(), abs=1e-5)
        assert by_name["log-ratio"] == pytest.approx((update.logp - ref_logps)[row][mask].tolist(), abs=1e-5)
        assert by_name["entropy"] == pytest.approx(update.entropy[row][mask].tolist(), abs=1e-5)
        letters = [token for token in found["tokens"] if len(token) == 1]  # the text leaves special tokens out
        assert "".join(letters) == rollout.completions[row]
