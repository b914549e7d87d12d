"""Log-probabilities of tokens against torch's log_softmax, with ranks and best tokens in one fixed order."""

import pytest
import torch
from bakehouse_kernels.reference import ReferenceOps
from bakehouse_replica.model.logprobs import token_logprobs
from torch import Tensor


def random_logits(n_rows: int, n_vocabulary: int = 500) -> Tensor:
    return torch.randn(n_rows, n_vocabulary, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("n_top", [0, 1, 7, 500, 1000])
def test_values_ranks_and_best_tokens_are_those_of_a_sorted_log_softmax(n_top: int) -> None:
    logits_SV = random_logits(20)
    token_ids = [*range(0, 95, 5), 499]
    expected_SV = torch.log_softmax(logits_SV.double(), dim=-1)
    for row, found in enumerate(token_logprobs(ReferenceOps(), logits_SV, token_ids, n_top)):
        order = expected_SV[row].argsort(descending=True).tolist()
        # float32 of a sum over 500 tokens, and of logits that reach 10.
        assert found.logprob == pytest.approx(float(expected_SV[row, token_ids[row]]), abs=5e-6)
        assert found.rank == 1 + order.index(token_ids[row])
        assert [id_ for id_, _ in found.top] == order[:n_top]
        assert [value for _, value in found.top] == pytest.approx(
            expected_SV[row, order[:n_top]].tolist(), abs=5e-6
        )


def test_the_token_s_own_value_is_the_one_among_the_best() -> None:
    logits_SV = random_logits(5)
    best = logits_SV.argmax(dim=-1).tolist()
    for token_id, found in zip(best, token_logprobs(ReferenceOps(), logits_SV, best, 3), strict=True):
        assert found.rank == 1
        assert found.top[0] == (token_id, found.logprob)


def test_equal_logits_stand_in_the_order_of_their_ids() -> None:
    logits_V = torch.zeros(1000)
    logits_V[[900, 30, 500]] = 1.0
    (found,) = token_logprobs(ReferenceOps(), logits_V[None], [500], 5)
    assert [id_ for id_, _ in found.top] == [30, 500, 900, 0, 1]
    assert found.rank == 2
    assert token_logprobs(ReferenceOps(), logits_V[None], [3], 0)[0].rank == 7  # after the three and 0, 1, 2


def test_half_precision_logits_are_taken_in_float32() -> None:
    logits_SV = random_logits(3).bfloat16()
    assert token_logprobs(ReferenceOps(), logits_SV, [1, 2, 3], 2) == token_logprobs(
        ReferenceOps(), logits_SV.float(), [1, 2, 3], 2
    )


def test_a_row_s_values_do_not_depend_on_how_many_rows_there_are() -> None:
    logits_SV = random_logits(9)
    token_ids = list(range(9))
    together = token_logprobs(ReferenceOps(), logits_SV, token_ids, 4)
    for row, token_id in enumerate(token_ids):
        (alone,) = token_logprobs(ReferenceOps(), logits_SV[row : row + 1], [token_id], 4)
        assert alone == together[row]


def test_logits_are_not_modified() -> None:
    logits_SV = random_logits(2)
    before = logits_SV.clone()
    token_logprobs(ReferenceOps(), logits_SV, [0, 1], 3)
    assert torch.equal(logits_SV, before)
