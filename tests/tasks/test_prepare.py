"""Published datasets become prompts: GSM8K, DeepMath and TL;DR from small local files in their formats."""

import json

import pytest

import rlkit as rl
from rlkit.tasks import prepare
from rlkit.tasks.templates import gsm8k_answer

GSM8K = [
    {"question": "Tom has 3 bags of 400 beans. How many?", "answer": "3 * 400 = <<3*400=1200>>1,200\n#### 1,200"},
    {"question": "Ann is 5 {years} old, twice as old as Bo. How old is Bo?", "answer": "5 / 2 = 2.5\n#### 2.5"},
]
DEEPMATH = [
    {"question": r"Compute $\int_0^1 x\,dx$.", "final_answer": r"\dfrac{1}{2}", "difficulty": 3.0, "topic": "Calculus"},
    {"question": "Is 7 prime?", "final_answer": "Yes", "difficulty": 1.0, "topic": "Numbers"},
]
TLDR = [{"prompt": "SUBREDDIT: r/cats\n\nPOST: My cat {sleeps}.\n\nTL;DR:", "completion": " Cat sleeps."}]
POSTS = [{"id": "t3", "subreddit": "cats", "title": "Cat", "post": "It sleeps.", "summary": "Cat sleeps."}]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def write(rows, kind):
        import datasets

        path = tmp_path / f"data.{kind}"
        if kind == "jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        else:
            getattr(datasets.Dataset.from_list(rows), f"to_{kind}")(str(path))
        return path

    return write


def user(row):
    return row["prompt"][-1]["content"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_gsm8k(file, kind):
    rows = prepare(file(GSM8K, kind), system="You are careful.")
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert user(rows[1]).startswith("Ann is 5 {years} old") and "####" in user(rows[1])
    assert rows["answer"][:] == ["1200", "2.5"] and rows[0]["source_answer"] == GSM8K[0]["answer"]
    rewards = rl.rewards.numeric_match(["so #### 1,200", "#### 3"], answer=rows["answer"][:])
    assert rewards == [1.0, 0.0]


def test_deepmath(file):
    rows = prepare(file(DEEPMATH, "parquet"))
    assert rows["answer"][:] == [r"\dfrac{1}{2}", "Yes"] and user(rows[0]).endswith(
        r"put the final answer in \boxed{}."
    )
    assert rows[0]["topic"] == "Calculus" and rows[0]["difficulty"] == 3.0
    assert rl.rewards.accuracy([r"\boxed{0.5}"], answer=rows["answer"][:1]) == [1.0]
    assert rl.rewards.check_gold(rows) == [1]


def test_tldr(file):
    rows = prepare(file(TLDR, "jsonl"), conversational=False)
    assert rows[0]["prompt"] == TLDR[0]["prompt"] == rows[0]["source_prompt"]
    assert rows[0]["answer"] == " Cat sleeps."
    posts = prepare(file(POSTS, "jsonl"), conversational=False)
    assert posts[0]["prompt"] == "SUBREDDIT: r/cats\n\nTITLE: Cat\n\nPOST: It sleeps.\n\nTL;DR:"
    assert posts[0]["answer"] == "Cat sleeps." and posts[0]["id"] == "t3"


def test_a_template_and_an_answer_of_your_own():
    source = [{"q": "1+1?", "n": 2, "answer": "two"}]
    rows = prepare(source, "{q} In {{braces}}, {n} characters.", answer=lambda row: str(row["n"]), conversational=False)
    assert rows[0] == {
        "prompt": "1+1? In {braces}, 2 characters.",
        "answer": "2",
        "q": "1+1?",
        "n": 2,
        "source_answer": "two",
    }
    assert prepare(source, "{q}", conversational=False)[0]["answer"] == "two"
    assert prepare(source, "{q}", answer="n")[0]["answer"] == 2


def test_prepared_rows_are_served():
    from builders import CHAT_TEMPLATE, character_tokenizer, tiny_policy

    policy = tiny_policy(tokenizer=character_tokenizer(chat_template=CHAT_TEMPLATE))
    rows = prepare([{"question": "1+1?", "answer": "#### 2"}], "{question}", answer=gsm8k_answer)
    batch = rl.PromptLoader(rows, policy, batch_size=1).next_batch()
    assert policy.tokenizer.decode(batch.token_ids[0]) == "<bos>u:1+1? a:" and batch.rows[0]["answer"] == "2"


BAD = {
    "no shape": ([{"text": "a"}], {}, r"the columns \['text'\] are of no known shape: deepmath"),
    "no column": ([{"q": "a"}], {"template": "{question}"}, r"the template names \['question'\], the columns"),
    "no field": ([{"q": "a"}], {"template": "plain"}, "'plain' names no column; expected columns in braces"),
    "attribute": ([{"q": "a"}], {"template": "{q.__class__}"}, r"names \['q.__class__'\]"),
    "position": ([{"q": "a"}], {"template": "{}"}, r"names \[''\]"),
    "open brace": ([{"q": "a"}], {"template": "{q"}, "is not well formed"),
    "no answer column": ([{"q": "a"}], {"template": "{q}", "answer": "gold"}, "there is no column 'gold'"),
    "no ####": ([{"question": "a", "answer": "4"}], {}, "row 0: the answer has no '####': '4'"),
    "no text": ([{"q": "a"}, {"q": None}], {"template": "{q}"}, r"row 1 has no text in \['q'\]: None"),
    "a row without it": ([{"q": "a"}, {}], {"template": "{q}"}, r"row 1 has no text in \['q'\]"),
    "system": ([{"q": "a"}], {"template": "{q}", "system": "s", "conversational": False}, "a system message needs"),
    "empty": ([], {}, "the dataset is empty"),
    "two kinds": ([{"q": "a", "n": 1}, {"q": "b", "n": None}, {"q": "c", "n": "x"}], {"template": "{q}"},
                  "column 'n' holds int in row 0 and str in row 2"),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "options", "message"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_prepared_is_named(rows, options, message):
    with pytest.raises(ValueError, match=f"prepare: .*{message}"):
        prepare(rows, **options)
