"""The length of segments where the user leaves it open."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomb.chunking import plan_chunks
from oomb.config import EngineConfig
from oomb.segments import MAX_SEGMENT_TOKENS, segment_pages

PAGE = 128


def segment_tokens(lengths, chunk_size=4096, documents=None, **settings):
    config = EngineConfig(chunk_size=chunk_size, page_size=PAGE, **settings)
    documents = documents or [[0]] * len(lengths)
    plan = plan_chunks(lengths, documents, chunk_size=chunk_size, page_size=PAGE)
    return segment_pages(config, plan.pages_per_row) * PAGE, [
        pages * PAGE for pages in plan.pages_per_row
    ]


@pytest.mark.parametrize(
    ("tokens", "segment"),
    [
        (100, PAGE),  # one chunk: no page is ever written
        (8192, 4096),
        (16384, 12288),  # its last chunk is in no page
        (36864, 32768),
        (40960, 20480),  # 9 chunks in pages: 5 + 4
        (65536, 32768),
        (131072, 32768),
        (98304, 32768),  # 23 chunks in pages, in room for 24
        (1 << 20, 32768),
    ],
)
def test_segments_are_long_and_waste_little(tokens, segment):
    assert segment_tokens([tokens])[0] == segment


def test_what_is_configured_is_taken_up_to_the_longest_row():
    assert segment_tokens([65536], segment_pages=7)[0] == 7 * PAGE
    assert segment_tokens([5000], segment_pages=1000)[0] == 4096


def test_a_large_chunk_is_a_segment():
    assert segment_tokens([1 << 18], chunk_size=65536)[0] == 65536


@settings(max_examples=100, deadline=None)
@given(
    chunks=st.sampled_from([128, 1024, 4096, 12288, 65536]),
    lengths=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=4),
)
def test_little_of_the_pool_is_empty(chunks, lengths):
    segment, rows = segment_tokens(lengths, chunks)
    pool = sum(-(-row // segment) * segment for row in rows)
    least = sum(-(-row // chunks) * chunks for row in rows)
    assert segment <= max(chunks, MAX_SEGMENT_TOKENS)
    assert pool <= least + max(chunks, least // 8)
