"""Text to ids as transformers does it, without torch."""

import json
import subprocess
import sys

import pytest

from tlt_pipeline.models.locate import ModelError
from tlt_pipeline.models.tokenizer import Tokenizer, character_tokenizer, load_tokenizer

CHATML = (
    "{% for m in messages %}\n  {% if loop.first and m.role != 'system' %}{{ 'sys\n' }}{% endif %}"
    "{{ m['role'] + ':' + m['content'] | trim }}\n{% endfor %}{% if add_generation_prompt %}{{ 'bot:' }}{% endif %}"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 :+=\n<>é"


def with_files(tokenizer, **changes):
    """The same tokenizer with entries of tokenizer_config.json changed."""
    config = json.loads(tokenizer.files["tokenizer_config.json"])
    return Tokenizer({**tokenizer.files, "tokenizer_config.json": json.dumps({**config, **changes}).encode()})


def saved(tokenizer, folder):
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder)
    return folder


def test_characters_are_tokens_in_the_order_given():
    tokenizer = character_tokenizer("ba\n1 b")
    assert (tokenizer.pad_id, tokenizer.eos_ids, tokenizer.vocab_size, tokenizer.bos_ids) == (0, (1,), 7, ())
    assert tokenizer.encode("ab\n 1") == [3, 2, 4, 6, 5]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([3, 2, 4, 6, 5, 1, 0]) == "ab\n 1"
    assert tokenizer.decode([2, 1], keep_special=True) == "b<eos>"


def test_every_text_of_the_alphabet_comes_back():
    tokenizer = character_tokenizer(ALPHABET)
    text = "what is  1+1 ?".replace("?", "=") + "\n\n é\n<eo s>"
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_character_outside_the_alphabet_is_named():
    with pytest.raises(ModelError, match=r"lacks '\?', 'W'"):
        character_tokenizer("abc").encode("aW?b")
    with pytest.raises(ModelError, match="alphabet is empty"):
        character_tokenizer("")


def test_transformers_loads_a_saved_character_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = character_tokenizer(ALPHABET)
    theirs = AutoTokenizer.from_pretrained(saved(tokenizer, tmp_path))
    text = "12 + 34 = 46\né<eos>"
    assert theirs(text).input_ids == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text), skip_special_tokens=True) == tokenizer.decode(tokenizer.encode(text))
    assert (theirs.eos_token_id, theirs.pad_token_id) == (1, 0)


def test_files_are_saved_as_they_were_loaded(tmp_path):
    first = saved(with_files(character_tokenizer("ab"), chat_template=CHATML), tmp_path / "a")
    second = saved(load_tokenizer(first), tmp_path / "b")
    assert {p.name: p.read_bytes() for p in first.iterdir()} == {p.name: p.read_bytes() for p in second.iterdir()}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "1+1 "}],
        [{"role": "system", "content": "be nice"}, {"role": "user", "content": "a\nb"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    ],
)
@pytest.mark.parametrize("place", ["config", "list", "jinja"])
def test_chats_are_rendered_as_transformers_does(tmp_path, messages, place):
    from transformers import AutoTokenizer

    tokenizer = character_tokenizer(ALPHABET)
    if place == "jinja":
        tokenizer = Tokenizer({**tokenizer.files, "chat_template.jinja": CHATML.encode()})
    else:
        several = [{"name": "default", "template": CHATML}, {"name": "tools", "template": "x"}]
        tokenizer = with_files(tokenizer, chat_template=CHATML if place == "config" else several)
    theirs = AutoTokenizer.from_pretrained(saved(tokenizer, tmp_path))
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.has_chat_template and tokenizer.apply_chat(messages) == expected


def test_a_template_that_refuses_says_why():
    tokenizer = with_files(character_tokenizer("ab"), chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ModelError, match="roles must alternate"):
        tokenizer.apply_chat([{"role": "user", "content": "a"}])
    with pytest.raises(ModelError, match="no valid Jinja"):
        with_files(tokenizer, chat_template="{% if %}").apply_chat([])


def test_a_template_cannot_reach_python():
    tokenizer = with_files(character_tokenizer("ab"), chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ModelError, match="refuses"):
        tokenizer.apply_chat([{"role": "user", "content": "a"}])


def test_without_a_template_chat_is_an_error():
    tokenizer = character_tokenizer("ab")
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match=r"task\.chat"):
        tokenizer.apply_chat([{"role": "user", "content": "a"}])


def test_answers_end_where_the_folder_says(tmp_path):
    folder = saved(character_tokenizer("abc"), tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    assert load_tokenizer(folder).eos_ids == (1, 2, 3)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text('{"eos_token_id": 4}')
    assert load_tokenizer(folder).eos_ids == (1, 4)


def test_a_prompt_gets_the_tokenizers_own_start():
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    tokenizer = with_files(character_tokenizer("sab"), bos_token="s")
    backend = tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    backend.post_processor = TemplateProcessing(single="s $A", special_tokens=[("s", 2)])
    tokenizer = Tokenizer({**tokenizer.files, "tokenizer.json": backend.to_str().encode()})
    assert tokenizer.bos_ids == (2,)
    assert (tokenizer.encode("ab"), tokenizer.encode_prompt("ab")) == ([3, 4], [2, 3, 4])


def test_a_folder_without_or_with_a_broken_tokenizer_is_one_line(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*save_pretrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read"):
        load_tokenizer(tmp_path)


def test_no_torch_is_imported():
    script = (
        "import sys\n"
        "from tlt_pipeline.models.tokenizer import character_tokenizer\n"
        "from tlt_pipeline.models.locate import locate_model\n"
        "import tlt_pipeline.models.fetch\n"
        "character_tokenizer('ab').encode('ab')\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
