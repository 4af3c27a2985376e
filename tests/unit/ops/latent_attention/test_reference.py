import torch

from tandem.ops.latent_attention.reference import latent_attention
from tests.tolerances import assert_close

PAGE_TOKENS, VALUES, WIDTH, HEADS = 4, 6, 9, 3


def test_each_query_sees_its_own_rows_up_to_itself():
    """By the definition: softmax with whole rows, over their first channels."""
    generator = torch.Generator().manual_seed(0)
    contexts, lengths = [10, 7, 5], [1, 3, 5]  # one decodes, one goes on, one begins
    rows = [torch.randn(context, WIDTH, generator=generator).double() for context in contexts]
    latents = torch.full((12, 1, 1, PAGE_TOKENS, WIDTH), torch.nan, dtype=torch.float64)
    table = torch.zeros(3, 3, dtype=torch.int32)
    pages = iter([7, 2, 11, 0, 5, 3, 9])
    for row, own in enumerate(rows):
        for index, part in enumerate(own.split(PAGE_TOKENS)):
            page = next(pages)
            table[row, index] = page
            latents[page, 0, 0, : len(part)] = part
    q = torch.randn(sum(lengths), HEADS, WIDTH, generator=generator).double()
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    lens = torch.tensor(contexts).int()
    out = latent_attention(q, latents, table, starts, lens, 0.4, 1, VALUES)
    expected, token = [], 0
    for row, (context, length) in enumerate(zip(contexts, lengths, strict=True)):
        for position in range(context - length, context):
            seen = rows[row][: position + 1]
            weights = (0.4 * q[token] @ seen.T).softmax(-1)
            expected.append(weights @ seen[:, :VALUES])
            token += 1
    assert_close(out, torch.stack(expected))
    assert out.is_contiguous()
