"""Arguments of Python calls: types and ranges as on the command line, in one line."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from toolkit import ModelPair, config, generate
from toolkit.config.command_line import prepare
from toolkit.config.values import fits
from toolkit.costs.load import LoadCost
from toolkit.decoding import Beams, Method, Sampling
from toolkit.errors import DecodingError, InputError
from toolkit.stopping import Fixed, Survival, Tail


def refusal(call):
    with pytest.raises(InputError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompts": "hello"}, "prompts: expected a list of prompts: texts, lists of token ids, lists of messages, got 'hel"),
        ({"prompts": None}, "prompts: expected a list of prompts"),
        ({"prompts": ["a", 3]}, "prompts: expected a list of prompts"),
        ({"prompts": {1, 2}}, "prompts: expected a list of prompts: texts, lists of token ids, lists of messages, got a set"),
        ({"max_new_tokens": True}, "max_new_tokens: expected an integer, got true"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"temperature": math.nan}, "temperature: expected at least 0, got nan"),
        ({"seed": 1.5}, "seed: expected an integer, got 1.5"),
        ({"seed": 2**64}, "seed: expected an integer within 64 bits"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"overrides": "policy.threshold=.3"}, "overrides: expected a list of texts, got 'policy.threshold=.3' (a list of one"),
        ({"head": 3}, "head: expected text or null, got 3"),
        ({"method": 3}, "method: expected text or a Method, got 3"),
        ({"pair": "toy"}, "pair: expected a ModelPair, got 'toy'"),
        ({"temprature": 1}, "unknown argument 'temprature': did you mean temperature"),
    ],
)  # fmt: skip
def test_generate_refuses(table_pair, arguments, said):
    assert refusal(lambda: generate(**{"pair": table_pair, "prompts": [[0, 1]], **arguments})).startswith(said)


@pytest.mark.parametrize(
    "prompt", [[True], [1.5], [[1]], ["a"], [None], [{"role": "user"}], [{"role": "u", "content": "x"}, 3]]
)
def test_a_prompt_that_is_none_is_named(table_pair, prompt):
    with pytest.raises(DecodingError, match="expected "):
        generate(table_pair, [prompt], "speculative", max_new_tokens=2)


def test_whole_numbers_of_any_kind_are_token_ids(table_pair):
    made = [[0, 1], (0, 1), np.array([0, 1]), torch.tensor([0, 1]), [np.int64(0), torch.tensor(1)], range(2)]
    assert [table_pair.encode(prompt) for prompt in made] == [[0, 1]] * len(made)


def test_parts_of_a_method_are_checked():
    good = config.method("speculative")
    assert refusal(lambda: Method("m", "tail", good.rule)) == "policy: expected a StoppingPolicy, got 'tail'"
    assert (
        refusal(lambda: Method("m", Tail(), good.rule, max_drafted=10**9))
        == "max_drafted: expected a number in [0, 4096], got 1000000000"
    )
    assert refusal(lambda: Survival(object())) == "policy.estimator: expected a ReadEstimator, got a object"
    assert refusal(lambda: Fixed(True)).startswith("policy.num_drafted: expected an integer")
    assert refusal(lambda: Beams(selection="tpo")) == "beams.selection: expected one of sample, top, got 'tpo'"
    assert refusal(lambda: Sampling(stop=["a", 1])).startswith("stop: expected")
    assert refusal(lambda: LoadCost.ratio("c")) == "c: expected a number of at least 0, got 'c'"
    assert (
        refusal(lambda: ModelPair.toy(device="gpu")) == "device: expected a device like cpu, cuda or cuda:1, got 'gpu'"
    )


def test_numbers_of_numpy_suit():
    assert Sampling(temperature=np.float32(0.5), top_k=np.int64(3)).top_k == 3
    assert fits(np.int64(3), float) and not fits(np.bool_(True), int) and not fits(torch.tensor(3), int)


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("train", ["+experimnt=toy_head"], "experiment"),
        ("frontier", ["dev=a", "test=b", "cost_ratio=nan"], "cost_ratio: expected a number above 0, got nan"),
        ("responses", ["world_size=1.5"], "world_size: expected an integer of at least 1, got 1.5"),
        ("report", ["@inputs=[a]"], "@inputs"),
        ("decode", ["-prompts.limit=2"], "expected KEY=VALUE, got '-prompts.limit=2': an override takes no -"),
        ("decode", ["prompts.limit={_target_:os.getcwd}"], "prompts.limit: expected an integer"),
        ("decode", ["head=''"], "head: expected text or null, not empty, got ''"),
        ("decode", ["pair.device=gpu"], "pair.device: expected a device like cpu"),
    ],
)
def test_commands_refuse(command, words, said):
    assert said in refusal(lambda: prepare(command, words))
