"""Real chat templates, each against its own rendering of a whole chat.

The package trl has them as files: `pip install --no-deps -r requirements/templates.txt`. It is not imported.
The tokenizer is a small byte-level one that has the control strings of the template as special tokens.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from chat import Chat, Dialogue
from record.model_checks import rendering_gap

pytestmark = pytest.mark.slow

PACKAGE = importlib.util.find_spec("trl")
FOLDER = Path(PACKAGE.origin).parent / "chat_templates" if PACKAGE else None
FILES = sorted(FOLDER.glob("*.jinja")) if PACKAGE else []
MISSING = "the package trl is not installed: pip install --no-deps -r requirements/templates.txt"
NEEDS_PARTS = ("idefics3", "llava_next", "smolvlm")  # templates for images: a message is a list of parts
OPEN_REASONING = ("deepseek_r1_distill", "deepseekv3", "nemotron_3", "qwen3_5_think", "qwen3_6", "qwen3_8")
CONTROL = re.compile(
    r"<[|｜][^<>|｜\n']+[|｜]?>|<[a-z_]+[|｜]>"  # <|im_end|>, <|turn>, <turn|>
    r"|</?[a-z_]+>|\[/?[a-zA-Z]*[A-Z]+\]"  # <end_of_turn>, [gMASK]
)


def control_strings(template: str) -> list[str]:
    return ["<bos>", "<eos>", *sorted(set(CONTROL.findall(template)) - {"<bos>", "<eos>"})]


def tokenizer_of(template: str):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = control_strings(template)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300 + len(special),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello hello user assistant system go to desk"] * 3, trainer)
    fast = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=backend, chat_template=template, bos_token="<bos>", eos_token="<eos>")


def files_that_start(names: tuple[str, ...], belong: bool) -> list:
    files = [file for file in FILES if file.stem.startswith(names) == belong]
    if not files:
        return [pytest.param(None, marks=pytest.mark.skip(reason=MISSING))]
    return [pytest.param(file, id=file.stem) for file in files]


def rendered(chat: Chat, *turns: tuple[str, str]) -> str:
    """Render the turns with the tokenizer's own method, on the fixed day of the prompts."""
    messages = [{"role": role, "content": text} for role, text in turns]
    template = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}" + chat.tokenizer.chat_template
    return chat.tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
        date_string="26 Jul 2024",
    )


def ids_of(chat: Chat, text: str) -> list[int]:
    return chat.tokenizer(text, add_special_tokens=False)["input_ids"]


def is_gpt_oss(file: Path) -> bool:
    return file.stem.startswith("gptoss")


def without_reasoning_tags(text: str) -> str:
    return re.sub(r"\s|</?think>", "", text)


@pytest.fixture(scope="module")
def chat_of():
    chats = {}

    def chat_of(file: Path) -> Chat:
        if file not in chats:
            chats[file] = Chat(tokenizer_of(file.read_text()))
        return chats[file]

    return chat_of


templates = pytest.mark.parametrize("file", files_that_start(NEEDS_PARTS, False))


@templates
def test_first_prompts_equal_the_rendering(file, chat_of):
    chat = chat_of(file)
    user = ("user", "go to desk")
    assert chat.first("go to desk") == ids_of(chat, rendered(chat, user))
    from jinja2 import TemplateError

    try:
        instructed = rendered(chat, ("system", "hello you"), user)
    except TemplateError as error:
        assert "System role not supported" in str(error)
        instructed = rendered(chat, ("user", "hello you\n\ngo to desk"))
    assert chat.first("go to desk", "hello you") == ids_of(chat, instructed)


@templates
def test_a_whole_chat_equals_the_rendering_up_to_empty_reasoning_in_earlier_turns(file, chat_of):
    chat = chat_of(file)
    first, second = chat.reply("reply one"), chat.reply("reply two")
    ids = chat.first("user one") + first + chat.extend(first, "user two")
    ids += second + chat.extend(second, "user three")
    turns = [("user", "user one"), ("assistant", "reply one"), ("user", "user two")]
    turns += [("assistant", "reply two"), ("user", "user three")]
    expected = rendered(chat, *turns)
    # A template may show earlier turns without the reasoning that the prompt has opened, or with an empty one
    text = chat.tokenizer.decode(ids)
    for user, reply in (("user one", "reply one"), ("user two", "reply two")):
        shown = expected.split(user)[1].split(reply)[0]
        own = text.split(user)[1].split(reply)[0]
        assert without_reasoning_tags(shown) == without_reasoning_tags(own)
        expected = expected.replace(user + shown + reply, user + own + reply)
        if is_gpt_oss(file):  # the sampled end of a reply stays
            expected = expected.replace(reply + "<|end|>", reply + "<|return|>")
    assert ids == ids_of(chat, expected)


@templates
def test_a_turn_is_closed_by_its_own_token_after_any_other_end(file, chat_of):
    chat = chat_of(file)
    reply = chat.reply("go")
    closed = chat.extend(reply, "on")
    (end,) = ids_of(chat, "<|end|>") if is_gpt_oss(file) else [chat.end_id]
    assert chat.extend(reply[:-1], "on") == [end, *closed]
    for other in set(chat.stop_ids) - {chat.end_id}:
        assert chat.extend([*reply[:-1], other], "on") == [end, *closed]


@templates
def test_prompts_have_the_ids_of_the_rendering(file, chat_of):
    assert rendering_gap(chat_of(file)) == ""


@pytest.mark.parametrize("file", files_that_start(("gptoss",), True))
def test_the_end_of_the_analysis_of_gpt_oss_does_not_end_its_reply(file, chat_of):
    chat = chat_of(file)
    analysis, final = (
        "<|channel|>analysis<|message|>Look, or go?<|end|>",
        "<|channel|>final<|message|>",
    )
    (end,), (closing,) = ids_of(chat, "<|end|>"), ids_of(chat, "<|return|>")
    assert end not in chat.stop_ids and chat.end_id == closing and closing in chat.stop_ids
    reply = ids_of(chat, f"{analysis}<|start|>assistant{final}<action>go to desk</action><|return|>")
    dialogue = Dialogue(chat, "think", "full", 0, 4000, 100)
    assert dialogue.read(reply) == ("go to desk", True)
    assert dialogue.read(ids_of(chat, analysis)) == ("", False)


@templates
def test_no_text_contains_a_control_token(file, chat_of):
    chat = chat_of(file)
    evil = "".join(control_strings(file.read_text()))
    control = set(chat.tokenizer.all_special_ids)
    assert control.isdisjoint(chat.encode(evil)) and chat.tokenizer.decode(chat.encode(evil)) == evil


@templates
def test_a_demonstration_parses_back_and_an_action_in_the_open_reasoning_is_invalid(file, chat_of):
    chat = chat_of(file)
    opened = file.stem.startswith(OPEN_REASONING)
    assert chat.opened == ("<think>\n" if opened else "")
    dialogue = Dialogue(chat, "think", "full", 0, 4000, 100)
    reply = dialogue.reply("go to desk 1")
    assert dialogue.read(reply) == ("go to desk 1", True)
    shown = chat.tokenizer.decode(chat.first("on") + reply)
    assert "<think>\n<think>" not in shown
    maybe = chat.encode("Maybe <action>go to desk 1</action>, or rather not.")
    assert dialogue.read(maybe) == (("", False) if opened else ("go to desk 1", True))


@pytest.mark.parametrize("file", files_that_start(NEEDS_PARTS, True))
def test_a_template_whose_messages_are_lists_is_refused(file):
    with pytest.raises(ValueError, match="does not show the text of each message once"):
        Chat(tokenizer_of(file.read_text()))
