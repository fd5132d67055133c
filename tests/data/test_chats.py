"""Chats on disk become samples that train what the assistant wrote, and only that."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax import forest
from m2jax.data import chats
from m2jax.text import chat, tokenizer
from m2jax_pipelines import llm

USER = {'role': 'user', 'content': 'How many?'}
ANSWER = {'role': 'assistant', 'reasoning_content': 'count', 'content': 'three'}
TOOL = {'type': 'function', 'function': {'name': 'sh', 'parameters': {}}}


@pytest.fixture(scope='module')
def tok():
  return tokenizer.train([chat.render([USER, ANSWER], [TOOL])] * 8, 420)


def loss_mask(sample):
  """[S] bool: which tokens of the sample are trained."""
  response = len(sample.tokens) - sample.prompt_length
  weights = np.ones(response) if sample.weights is None else sample.weights
  return np.concatenate([np.zeros(sample.prompt_length, bool), weights > 0])


def write(path, *lines):
  path.write_text('\n'.join(json.dumps(line) for line in lines) + '\n')
  return path


def test_read_fills_in(tmp_path):
  """System prompt and tools of the call apply only to chats without their own."""
  own = {'role': 'system', 'content': 'Be brief.'}
  other = {'function': {'name': 'other', 'parameters': {}}}
  path = write(
    tmp_path / 'a.jsonl',
    {'messages': [USER, ANSWER], 'success': 1.0},
    {'messages': [own, USER, ANSWER], 'tools': [other]},
  )
  plain, full = chats.read(path, system='Use sh.', tools=[TOOL])
  assert plain.messages[0] == {'role': 'system', 'content': 'Use sh.'}
  assert list(plain.tools) == [TOOL]
  assert full.messages[0] == own and full.tools == [other]
  assert chats.read(path)[0].messages[0] == USER


@pytest.mark.parametrize(
  'line',
  [
    {'messages': [USER]},
    {'messages': []},
    {'messages': 'text'},
    {'text': 'x'},
    [],
    {'messages': [USER, {'role': 'tool', 'content': 'x'}, ANSWER]},
    {'messages': [USER, ANSWER], 'tools': [{}]},
    {'messages': [USER, ANSWER], 'training': 'false'},
    {'messages': [USER, ANSWER], 'training': None},
  ],
)
def test_bad_line(tmp_path, line):
  """Invalid chats, and chats without a response to train, are rejected by line."""
  path = write(tmp_path / 'bad.jsonl', {'messages': [USER, ANSWER]}, line)
  with pytest.raises(ValueError, match=r'bad\.jsonl, line 2'):
    chats.read(path)


def test_no_chats(tmp_path):
  """An empty file would train on nothing."""
  with pytest.raises(ValueError, match='contains no chats'):
    chats.read(write(tmp_path / 'a.jsonl').absolute())


def test_what_must_not_be_trained_is_skipped_and_counted(tmp_path, caplog):
  """Calls of authors and judges are in no training data, whatever file they are in."""
  judged = {'role': 'assistant', 'content': 'The essay is good.'}
  call = {'messages': [USER, judged], 'training': False}
  no_answer = {'messages': [USER], 'text': 'good', 'training': False}
  own = {'messages': [USER, ANSWER], 'training': True}
  path = write(tmp_path / 'a.jsonl', call, own, no_answer)
  with caplog.at_level('WARNING'):
    (found,) = chats.read(path)
  assert list(found.messages) == [USER, ANSWER]
  assert '2 lines with training: false are skipped' in caplog.text


def test_a_file_of_calls_is_refused(tmp_path):
  """Logged calls have nothing to train: the error gives the reason."""
  log = tmp_path / 'calls.jsonl'
  config = llm.LLMConfig(url='http://127.0.0.1:9/v1', model='m', retries=0)
  author = llm.LLMClient(config, 'author', log)
  with pytest.raises(llm.NoAnswer):
    asyncio.run(author.write([USER, ANSWER], lambda: 'scripted'))
  with pytest.raises(ValueError, match='no chats to train: 1 lines with training: f'):
    chats.read(log)


def test_encode_trains_the_assistant(tok):
  """The trained tokens spell the assistant's text to its end, and nothing else."""
  ((sample,),) = chats.encode([chats.Chat('a', [USER, ANSWER], [TOOL])], tok, 1000)
  mask = loss_mask(sample)
  text = chat.render([USER, ANSWER], [TOOL])
  assert tok.decode(sample.tokens) == text.rstrip('\n')
  trained = tok.decode(sample.tokens[mask])
  assert trained == 'count\n</think>\n\nthree[e~['


def test_trained_tokens_by_role(tok):
  """All are the assistant's; a mask that is too wide shows by the roles it trains."""
  call = {'function': {'name': 'sh', 'arguments': '{}'}}
  asks = {'role': 'assistant', 'content': '', 'tool_calls': [call]}
  messages = [USER, asks, {'role': 'tool', 'content': '4'}, ANSWER]
  groups = chats.encode([chats.Chat('a', messages, [TOOL])], tok, 10_000)
  shares = chats.trained_by_role(groups, tok)
  assert shares.pop('trained/assistant') == shares.pop('trained/ends') == 1
  assert not any(shares.values())
  ids = groups[0][0].tokens
  wide = chats.trained_by_role([[forest.Sample(ids, 1)]], tok)
  assert wide.pop('trained/ends') == 1
  assert all(wide.values()) and sum(wide.values()) == pytest.approx(1)
  weights = np.append(groups[0][0].weights[1:], 0)  # a mask that is shifted
  shifted = dataclasses.replace(groups[0][0], weights=weights)
  assert chats.trained_by_role([[shifted]], tok)['trained/ends'] == 0


def test_encode_leaves_out_what_is_too_long(tok, caplog):
  """A long chat is left out with a warning; if all are, that is an error."""
  short = chats.Chat('short', [USER, ANSWER])
  long = chats.Chat('long', [USER, {**ANSWER, 'content': 'three ' * 200}])
  length = len(chats.encode([short], tok, 1000)[0][0].tokens)
  assert len(chats.encode([long, short], tok, length)) == 1
  with pytest.raises(ValueError, match=f'none of 2 .* at most {length - 1} tokens'):
    chats.encode([long, short], tok, length - 1)


TEMPLATES = {
  'm2': chat.Template(),
  'named': chat.Template(default_system='Be M2.', keep_all_thinking=True),
  'listed': chat.Template(tools_header='\n\nFunctions:\n', tools_footer='Call them:\n'),
}


def test_templates_are_drawn_by_conversation(tok):
  """Every template is shown; the chats of one conversation share theirs, so that their
  prefix is still merged, and a second run has the same."""
  messages = [USER, ANSWER, USER, ANSWER]
  made = [
    chats.Chat(f'chat {i}', messages[: n + 1], trained=n)
    for i in range(30)
    for n in (1, 3)
  ]
  groups = chats.encode(made, tok, 1000, TEMPLATES)
  assert list(map(len, groups)) == [2] * 30
  systems = [
    tok.decode(first.tokens).startswith(']~!b[]~b]system\nBe M2.')
    for first, _ in groups
  ]
  assert 0 < sum(systems) < 30
  for (first, second), named in zip(groups, systems, strict=True):
    assert tok.decode(second.tokens).startswith(']~!b[]~b]system\nBe M2.') == named
    kept = tok.decode(second.tokens).count('count\n</think>')
    assert kept == (2 if named else 1)
    assert tok.decode(first.tokens[loss_mask(first)]).endswith('three[e~[')
  again = chats.encode(made, tok, 1000, TEMPLATES)
  for one, other in zip(groups, again, strict=True):
    assert [s.tokens.tolist() for s in one] == [s.tokens.tolist() for s in other]


@pytest.mark.parametrize('name', TEMPLATES)
def test_a_template_changes_what_is_read_and_not_what_is_trained(tok, name):
  """Of a chat with tools: the trained tokens are the assistant's, exactly; those of a
  call are read back as the call that they are, whatever the template around them."""
  call = {'type': 'function', 'id': 'c', 'function': {'name': 'sh', 'arguments': '{}'}}
  asking = {'role': 'assistant', 'reasoning_content': 'count', 'tool_calls': [call]}
  result = {'role': 'tool', 'tool_call_id': 'c', 'content': '</think> three[e~['}
  found = chats.Chat('a', [USER, asking, result, ANSWER], [TOOL])
  only = {name: TEMPLATES[name]}
  ((sample,),) = chats.encode([found], tok, 1000, only)
  ids, mask = sample.tokens, loss_mask(sample)
  pieces = chat.segments(found.messages, found.tools, template=TEMPLATES[name])
  ((plain,),) = chats.encode([found], tok, 1000)
  np.testing.assert_array_equal(ids[mask], plain.tokens[loss_mask(plain)])
  trained = ''.join(piece.text for piece in pieces if piece.owned)
  assert tok.decode(ids[mask]) == trained
  said = chat.parse(trained.partition('[e~[')[0], [TOOL])
  assert [c.name for c in said.tool_calls] == ['sh'] and said.reasoning == 'count'
  context = tok.decode(ids[~mask])
  assert TEMPLATES[name].tools_header in context
  assert (name == 'm2') == (ids.tolist() == plain.tokens.tolist())


def test_the_turns_of_a_conversation_are_a_group(tok):
  """Each trains one message of its own prompt; a repetition is another conversation."""
  messages = [USER, ANSWER, USER, ANSWER]
  turns = [chats.Chat('a', messages[: n + 1], trained=n) for n in (1, 3)]
  whole = chats.Chat('a', messages)
  made = [*turns, *turns, turns[0]._replace(name='b'), whole, whole]
  assert list(map(len, chats.encode(made, tok, 1000))) == [2, 2, 1, 2, 2]


def test_chats_that_end_without_thinking_are_counted(tok, caplog):
  """Generation begins with <think>: a policy that has not learned it, derails."""
  silent = {key: value for key, value in ANSWER.items() if key != 'reasoning_content'}
  both = [chats.Chat('a', [USER, ANSWER]), chats.Chat('b', [USER, silent])]
  with caplog.at_level('WARNING'):
    chats.encode(both[:1], tok, 1000)
    assert 'without thinking' not in caplog.text
    chats.encode(both, tok, 1000)
  assert '1 of 2 turns end without thinking' in caplog.text


def test_each_answer_is_trained_as_it_is_generated(tok):
  """LlamaFactory#9288: as one sample, a chat of two user turns trained its first answer
  behind no thinking, where M2's template shows none, and never its reasoning."""
  calls = [{'id': 'c', 'function': {'name': 'sh', 'arguments': '{}'}}]
  asking = {'role': 'assistant', 'reasoning_content': 'look', 'tool_calls': calls}
  result = {'role': 'tool', 'tool_call_id': 'c', 'content': '3'}
  whole = chats.Chat('a', [USER, asking, result, ANSWER, USER, USER, ANSWER], [TOOL])
  (samples,) = chats.encode([whole], tok, 1000)
  turns = [(whole.messages[:4], (1, 3)), (whole.messages, (6,))]
  for sample, (messages, trained) in zip(samples, turns, strict=True):
    assert tok.decode(sample.tokens) == chat.render(messages, [TOOL]).rstrip('\n')
    mask, at = loss_mask(sample), 0
    said = [s for s in tok.decode(sample.tokens[mask]).split('[e~[') if s]
    assert len(said) == len(trained) and all('</think>' in text for text in said)
    for i in trained:  # each behind the prompt with which the engine generates it
      ids, _ = tokenizer.encode_chat(tok, chat.segments(messages[:i], [TOOL], True))
      np.testing.assert_array_equal(sample.tokens[: len(ids)], ids)
      assert not mask[at : len(ids)].all() and mask[len(ids)]
      at = len(ids)
  keep = {'keep': chat.Template(keep_all_thinking=True)}
  ((sample,),) = chats.encode([whole], tok, 1000, keep)  # nothing is omitted there
  assert tok.decode(sample.tokens[loss_mask(sample)]).count('</think>') == 3


def test_results_of_parallel_calls_have_the_order_of_the_calls(tmp_path):
  """In a file, too, another's result would be read as a call's own."""
  calls = [{'id': i, 'function': {'name': 'sh', 'arguments': '{}'}} for i in 'ab']
  asking = {'role': 'assistant', 'reasoning_content': 'both', 'tool_calls': calls}
  said = [{'role': 'tool', 'tool_call_id': i, 'content': i * 3} for i in 'ba']
  line = {'messages': [USER, asking, *said, ANSWER]}
  (found,) = chats.read(write(tmp_path / 'a.jsonl', line))
  assert [m['content'] for m in found.messages if m['role'] == 'tool'] == ['aaa', 'bbb']
  line = {'messages': [USER, asking, said[0], ANSWER]}
  with pytest.raises(ValueError, match=r"line 1.*result of 'a'"):
    chats.read(write(tmp_path / 'b.jsonl', line))
  last = {'messages': [USER, asking]}  # the task ends with them
  assert len(chats.read(write(tmp_path / 'c.jsonl', last))) == 1


OTHER = {
  b'{"conversations": [{"from": "human", "value": "x"}]}': 'conversations.*ShareGPT',
  b'{"prompt": "x", "completion": "y"}': "no field 'messages', but prompt, completion",
  b'[{"messages": []}]': 'a JSON list; each line must be an object',
  b'{': 'not a chat: Expecting',
  b'[' * 100_000: 'not a chat: nested more than',
  b'PAR1\x15\x04\xff': "not a chat: 'utf",
}


@pytest.mark.parametrize('line', OTHER)
def test_other_files_are_named(tmp_path, line):
  """What the line has, and what a chat looks like; no KeyError."""
  path = tmp_path / 'other.jsonl'
  path.write_bytes(line + b'\n')
  with pytest.raises(ValueError, match=rf'other.jsonl, line 1: .*{OTHER[line]}'):
    chats.read(path)


class TestSample:
  """A sample of which only some tokens are trained."""

  @settings(deadline=None, max_examples=40)
  @given(mask=st.lists(st.booleans(), min_size=1, max_size=20).filter(any))
  def test_terms_are_the_masked_tokens(self, mask):
    """Seen from the forest's side, where the loss is taken."""
    mask = [False, *mask]
    tokens = np.arange(len(mask)) + 10
    sample = chats.sample(tokens, mask)
    packed = forest.merge([sample], row_tokens=32)
    trained = packed.tokens[0][packed.term_token[0][packed.weight[0] > 0]]
    np.testing.assert_array_equal(trained, tokens[mask])

  @pytest.mark.parametrize(
    ('tokens', 'mask', 'match'),
    [
      ([1, 2], [0], r'must be \[S\]'),
      ([1, 2], [1, 1], 'token 0'),
      ([1, 2], [0, 0], 'trains no token'),
    ],
  )
  def test_bad_masks_are_named(self, tokens, mask, match):
    """A loss without terms would train nothing and say so nowhere."""
    with pytest.raises(ValueError, match=match):
      chats.sample(tokens, mask)
