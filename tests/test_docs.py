"""README.md and docs/ name only what exists: names of the code, files, headings, flags and commands.

`problems(text, path)` returns the faults of a page. The rules for text in backticks:
    rspo.update, games.webshop.judge    a module of this project and a definition in it, not an import
    World.game                          a class of this project and its member
    docs/FLAGS.md, metrics.jsonl        a file of the project, or a file name in a string of the code
    zero_spread_groups, won             an identifier of the code, or a word in a string of the code
    kl_coef=0                           the name before "=" is such a word
    --plan, python -m bench core        flags and commands, see below
    click[< prev], <end>                other text is an example and is not checked
Docstrings and comments do not count as code, since they may name things that have gone.
"""

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

JOINED = "summary.json: record.metrics.progress joins the two words"
ALLOWED = {  # names that the code does not contain
    "success_start": JOINED,
    "success_end": JOINED,
    "outcome_start": JOINED,
    "outcome_end": JOINED,
    "crashed_episodes_start": JOINED,
    "crashed_episodes_end": JOINED,
    "_on": "METRICS.md: the end of a metric's name",
    "_off": "METRICS.md: the end of a metric's name",
    "peft.AutoPeftModelForCausalLM.from_pretrained": "peft: RUNNING.md says how to load policy/",
}
FOREIGN_FLAGS = {"--nproc_per_node": "torchrun", "--index-url": "pip"}
FOREIGN_MODULES = {"spacy": "downloads its model, for WebShop"}
SUFFIXES = ("py", "md", "json", "jsonl", "png", "html", "txt", "toml", "cff", "safetensors")
SHELL = ("&&", "||", "|", ">", "done")  # words that end a command


# --- what the code contains ---------------------------------------------------------------------------------


@functools.cache
def modules():
    """Return {dotted name: syntax tree} of the project's modules, without tests/."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py")]
    trees = {}
    for file in files:
        path = file.relative_to(ROOT).with_suffix("")
        if path.parts[0] != "tests" and file.stem != "__init__":
            trees[".".join(path.parts)] = ast.parse(file.read_text(encoding="utf-8"))
    return trees


def names_of(target):
    """Yield the names that an assignment to this target defines."""
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            yield node.id


def definitions(body):
    """Return {name: node} of the definitions in the body of a module or class."""
    found = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found.update((name, node) for target in node.targets for name in names_of(target))
        elif isinstance(node, ast.AnnAssign):
            found.update((name, node) for name in names_of(node.target))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            found.update(definitions(node.body))
    return found


@functools.cache
def classes():
    """Return {name: node} of all classes at the top of a module."""
    found = {}
    for tree in modules().values():
        found.update((node.name, node) for node in tree.body if isinstance(node, ast.ClassDef))
    return found


def members(cls):
    """Return the names of a class's methods and attributes, with those of its parents in this project."""
    names = set(definitions(cls.body))
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    for base in cls.bases:
        if isinstance(base, ast.Name) and base.id in classes():
            names |= members(classes()[base.id])
    return names


@functools.cache
def words():
    """Return the set of identifiers and words of strings, and a pattern of the words that f-strings make.

    f"policy_loss_{source}" makes policy_loss_[a-z]+.
    """
    found, patterns = set(), set()
    for tree in modules().values():
        docstrings = set()
        for node in ast.walk(tree):  # a parent comes before its children
            if isinstance(node, ast.Expr):
                docstrings.add(node.value)
            elif isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.arg | ast.keyword):
                found.add(node.arg)
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.alias):
                found.update(node.name.split("."))
            elif isinstance(node, ast.JoinedStr):
                docstrings.update(node.values)
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                for word in re.findall(r"(?:[\w.-]|{})+", "".join(parts)):
                    if "{}" not in word:
                        found.add(word)
                    elif re.fullmatch(r"\w{4,}", word.replace("{}", "")):
                        patterns.add(word.replace("{}", "[a-z]+"))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                found.update(re.findall(r"\w+", node.value))
                found.update(re.findall(r"[\w.-]+", node.value))  # file names
    return found, re.compile("|".join(sorted(patterns)))


def is_word(name):
    """Check that the code contains the name, as an identifier or in a string."""
    found, patterns = words()
    return name in found or bool(patterns.fullmatch(name))


def file_of(name):
    """Return the file that defines the dotted name of a module, a definition or a member; else None."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if module in modules():
            path = ROOT.joinpath(*parts[:length]).with_suffix(".py")
            return path if defines(modules()[module].body, parts[length:]) else None
    return None


def defines(body, names):
    """Check that a module's body defines the names: (), (name,) or (class, member)."""
    if not names:
        return True
    node = definitions(body).get(names[0])
    if node is None or len(names) > 2:
        return False
    return len(names) == 1 or (isinstance(node, ast.ClassDef) and names[1] in members(node))


def is_dotted_name(name):
    first, *rest = name.split(".")
    if first in {module.split(".")[-1] for module in modules()} | {path.name for path in folders()}:
        return file_of(name) is not None  # a module of a folder needs the folder's name
    if first in classes():
        return len(rest) == 1 and rest[0] in members(classes()[first])
    return all(is_word(part) for part in name.split("."))


def folders():
    return [path for path in ROOT.iterdir() if (path / "__init__.py").is_file()]


def is_path(name):
    """Check a path: of the project, or made of words of the code. RUN, PATH, <seed> stand for any name."""
    if (ROOT / name).exists():
        return True
    parts = [part for part in name.split("/") if part not in ("", "~", ".cache")]
    if parts[0] in {path.name for path in ROOT.iterdir()} - {"reward_model", "runs"} or name.endswith(".py"):
        return False
    return all(part.isupper() or "<" in part or is_word(re.sub(r"_\d{6}$", "", part)) for part in parts)


# --- flags and commands -------------------------------------------------------------------------------------


@functools.cache
def flags_of(program):
    """Return the flags of train.py, or of a module that calls add_argument."""
    if program == "train":
        fields = [*classes()["Config"].body, *classes()["Args"].body]
        names = {field.target.id for field in fields if isinstance(field, ast.AnnAssign)}
        return {"--help"} | {f"--{name}" for name in names} | {f"--no_{name}" for name in names}
    found = {"--help"}
    for node in ast.walk(modules()[program]):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            found.update(a.value for a in node.args if isinstance(a, ast.Constant))
    return found


@functools.cache
def all_flags():
    flags = set(FOREIGN_FLAGS)
    for program in modules():
        flags |= flags_of(program)
    return flags


def flags_in(text):
    """Return the flags that a text names. Dashes inside a name of a flag of train.py count as underscores."""
    flags = re.findall(r"(?<![\w`-])--[a-z][\w-]*|(?<=`)--[a-z][\w-]*", text)
    return [flag if flag in FOREIGN_FLAGS else "--" + flag[2:].replace("-", "_") for flag in flags]


def command_problems(line):
    """Yield the faults of the commands in a line of shell."""
    try:
        parts = shlex.split(line, comments=True)
    except ValueError as error:
        yield f"{line}: {error}"
        return
    while "python" in parts or "torchrun" in parts:
        start = min(parts.index(name) for name in ("python", "torchrun") if name in parts)
        command, parts = parts[start:], parts[start + 1 :]
        ends = [i for i, part in enumerate(command) if part.endswith(";") or part in SHELL]
        command = command[: ends[0] + 1] if ends else command
        program = program_of(command)
        if program is None or program in FOREIGN_MODULES:  # None: the word "python", not a command
            continue
        if program not in modules():
            yield f"{line}: there is no program {program}"
            continue
        for flag in flags_in(" ".join(command)):
            if flag not in flags_of(program) and flag not in FOREIGN_FLAGS:
                yield f"{line}: {program} has no flag {flag}"


def program_of(command):
    """Return the module that a command runs, such as "train" or "bench.__main__"; None if it runs none."""
    if "-m" in command[:2]:
        module = command[2] if len(command) > 2 else ""
        return f"{module}.__main__" if (ROOT / module / "__main__.py").is_file() else module
    scripts = [part for part in command if part.endswith(".py")]
    return scripts[0].removesuffix(".py").replace("/", ".") if scripts else None


# --- a page -------------------------------------------------------------------------------------------------


def without_blocks(text):
    """Split a page into (text without code blocks, lines of the code blocks with continuations joined)."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return rest, "\n".join(blocks).replace("\\\n", " ").splitlines()


def anchors(text):
    """Return the anchors of the headings, as GitHub makes them."""
    found = []
    for title in re.findall(r"^#+ (.*)", without_blocks(text)[0], re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return set(found)


def code_spans(text):
    """Return the texts in backticks. A span may continue in the next line."""
    spans = []
    for paragraph in re.split(r"\n\s*\n", text):
        spans += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", paragraph)]
    return spans


def span_problems(span):
    """Yield the faults of a text in backticks."""
    name = re.sub(r"\(.*\)$", "", span)
    if span in ALLOWED:
        return
    if re.match(r"(\w+=\S+ )?(python|torchrun) ", span):
        yield from command_problems(span)
    elif re.fullmatch(r"[\w~.<>/-]+", span) and ("/" in span or span.rpartition(".")[2] in SUFFIXES):
        if not is_path(span):
            yield f"{span}: there is no such file"
    elif re.fullmatch(r"\w+=\S+", span):
        if not is_word(span.partition("=")[0]):
            yield f"{span}: the code has no such name"
    elif re.fullmatch(r"[^\W\d]\w*", name):
        if not (is_word(name) or file_of(name)):
            yield f"{span}: the code has no such name"
    elif re.fullmatch(r"[^\W\d]\w*(\.\w+)+", name) and not is_dotted_name(name):
        yield f"{span}: the code has no such name"


def link_problems(text, path):
    """Yield the faults of the links of a page."""
    for label, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        file = (path.parent / file).resolve() if file else path
        if not file.exists():
            yield f"{target}: there is no such file"
        elif anchor and anchor not in anchors(text if file == path else file.read_text(encoding="utf-8")):
            yield f"{target}: there is no such heading"
        name = label.strip().strip("`")
        if target.endswith(".py") and "." in name and not name.endswith(".py") and file_of(name) != file:
            yield f"{name}: is not defined in {target}"


def problems(text, path=ROOT / "README.md"):
    """Return the faults of a page as messages."""
    prose, commands = without_blocks(text)
    found = list(link_problems(prose, path))
    for span in code_spans(prose):
        found += span_problems(span)
    for line in commands:
        found += command_problems(line)
    found += [f"{flag}: no program has this flag" for flag in flags_in(text) if flag not in all_flags()]
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_names_only_what_exists(path):
    assert problems(path.read_text(encoding="utf-8"), path) == []


def test_a_correct_text_has_no_problems():
    text = """
# Some heading

[here](#some-heading) `rspo.update` [`rspo.train`](rspo.py) `World.game` `Policy.fork` `zero_spread_groups`
`policy_loss_on` `Config.algo` `losses.py` `metrics.jsonl` `checkpoints/update_000012/` `click[< prev]`
`--plan` `--no-gigpo_std` `python train.py --method rspo_h` `games.household.Room.notes` `kl_coef=0`
`<end>` `python -m
bench.gpu_check --dry_run`

```
pip install -r requirements.txt && python train.py --algo gigpo   # or ppo
torchrun --nproc_per_node=8 train.py --preset paper-alfworld \\
  --k 3
for seed in 0 200; do
  python train.py --seed $seed --out runs/s$seed
done
```
"""
    assert problems(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "`rspo.updat`",
        "`rspo.update.rng`",
        "`rspo.Row`",  # imported there, but defined in batch
        "`losses.group_advantage`",
        "`World.gmae`",
        "`games.household.Room.note`",
        "`household.Room`",  # the module is games.household
        "`zero_spread_group`",
        "`policy_loss_`",
        "`lossess.py`",
        "`games/houshold.py`",
        "`metric.jsonl`",
        "`kl_coeff=0`",
        "`--methd rspo`",
        "--methd",
        "[here](nothing.md)",
        "[here](#nothing)",
        "[here](README.md#nothing)",
        "[`rspo.train`](losses.py)",
        "[`rspo.trian`](rspo.py)",
        "`python trian.py`",
        "```\npython trian.py\n```",
        "```\npython -m bnech core\n```",
        "```\npython -m bench.gpu_check --method rspo\n```",
        "```\npip install x && python train.py \\\n  --methd rspo\n```",
        "```\ntorchrun --nproc_per_node=8 trian.py\n```",
    ],
)
def test_a_misspelt_name_is_a_problem(text):
    assert problems(text)
